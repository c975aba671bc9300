"""Pretrained weights from the hub: one process of a node at a time, in seconds, never at random."""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from meshwork.config import ConfigError
from meshwork.data.table import cache_folder


def from_hub(create: Callable[[], nn.Module], name: str, timeout_s: float) -> nn.Module:
    """What `create` gives, called by one process of this node at a time: the first one downloads.

    What made it fail is left beside the lock: those that waited meanwhile fail of it at once.
    Raises ConfigError where the weights cannot be had, or another process takes over timeout_s.
    """
    from filelock import FileLock, Timeout

    began = time.time()
    try:
        folder = cache_folder()
    except OSError:  # nothing to share: each process asks for itself
        folder = Path(tempfile.mkdtemp())
    failure = folder / "pretrained.failed"
    try:
        with FileLock(folder / "pretrained.lock", timeout=timeout_s):
            reason = _told(failure, name, began)
            if reason is None:
                try:
                    with _offline_where_unreachable():
                        return create()
                except ConfigError:
                    raise
                except Exception as e:  # whatever the hub's client raises: never untrained weights
                    reason = first_line(e)
                    failure.write_text(f"{name}\n{reason}")
    except Timeout:
        reason = f"another process of this machine holds the download for over {timeout_s:.0f} s"
    home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
    cache = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    raise ConfigError(
        f"no pretrained weights for model.name={name} ({reason}). Looked into {cache} and the hub: "
        "give a local file with model.checkpoint_path=..., or set model.pretrained=false"
    )


def _told(failure: Path, name: str, since: float) -> str | None:
    """Why another process has failed to get this model's weights since then, if one has."""
    if not failure.exists() or failure.stat().st_mtime < since:
        return None
    of, _, reason = failure.read_text().partition("\n")
    return reason if of == name else None


@contextmanager
def _offline_where_unreachable(timeout_s: float = 5.0) -> Iterator[None]:
    """The hub's client looks into its cache alone where it would else try again for a minute."""
    from huggingface_hub import constants

    url, found = urlsplit(constants.ENDPOINT), []

    def connect() -> None:
        place = (url.hostname, url.port or (80 if url.scheme == "http" else 443))
        with suppress(OSError), socket.create_connection(place, timeout_s):
            found.append(True)

    before = constants.HF_HUB_OFFLINE
    if not before and not {"http", "https", "all"} & getproxies().keys():  # a proxy knows its way
        thread = threading.Thread(target=connect, daemon=True)  # looking up a name may take long
        thread.start()
        thread.join(timeout_s)
        constants.HF_HUB_OFFLINE = not found
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
