"""Where a run came from: code, packages, machine and command, without secrets.

Nothing here fails or takes long: what cannot be found out is left empty.
"""

import getpass
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from meshwork.keys import is_secret

HERE = Path(__file__).parent
GIT_TIMEOUT_S = 5.0
DIFF_BYTES = 1_000_000
HIDDEN = "***"

URL_USER = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s?#]*@", re.I)
# key=value, '--key value' and a quoted "key": "value"; the key decides whether the value is hidden.
PAIRS = (
    re.compile(r"""([\w.+~/-]+)(=)("[^"]*"|'[^']*'|[^\s,&;)}\]]+)"""),
    re.compile(r"""(--[\w.-]+)(\s+)("[^"]*"|'[^']*'|[^\s-]\S*)"""),
    re.compile(r"""["']([\w.-]+)(["']\s*:\s*)("[^"]*"|'[^']*')"""),
)


def redact(text: str) -> str:
    """The text without secrets.

    User info leaves URLs. The value behind a key that names a secret becomes ***, and so does the
    value of each environment variable whose name does.
    """
    text = URL_USER.sub(r"\1", text)
    for pair in PAIRS:
        text = pair.sub(_hide, text)
    for name, value in os.environ.items():
        if is_secret(name) and len(value) >= 8:
            text = text.replace(value, HIDDEN)
    return text


def collect(argv: list[str], ranks: Any, device: Any) -> dict:
    """What provenance.json holds: plain values, whatever cannot be found out is None.

    argv: as sys.argv has it. ranks: the Ranks of this process. device: where it computes.
    """
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": [redact(word) for word in _whole_pairs(argv)],
        "folder": os.getcwd(),
        "user": _or_none(getpass.getuser),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": str(device),
        "devices": _or_none(_devices) or [],
        "ranks": asdict(ranks) if is_dataclass(ranks) else None,
        "git": git_state(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "packages": _or_none(_packages),
    }


def git_state(where: Path = HERE) -> dict | None:
    """sha, branch, remote without user info, and dirty: not all is committed; None outside git."""
    if _git("rev-parse", "--git-dir", where=where) is None:
        return None
    remote = _git("config", "--get", "remote.origin.url", where=where)
    status = _git("status", "--porcelain", where=where)
    return {
        "sha": _git("rev-parse", "--verify", "HEAD", where=where),
        "branch": _git("symbolic-ref", "--short", "HEAD", where=where),
        "remote": remote and redact(remote),
        "dirty": None if status is None else bool(status),
    }


def git_diff(where: Path = HERE) -> str:
    """The patch from the last commit, up to 1 MB, and the untracked names; "" outside git."""
    top = _git("rev-parse", "--show-toplevel", where=where)
    if not top:
        return ""
    patch = _git("diff", "HEAD", "--no-color", "--no-ext-diff", where=Path(top)) or ""
    names = _git("ls-files", "--others", "--exclude-standard", where=Path(top)) or ""
    untracked = "".join(f"# untracked: {name}\n" for name in names.splitlines()[:1000])
    return "\n".join(part for part in (patch, untracked) if part)


def _hide(pair: re.Match) -> str:
    key = pair[1].lstrip("+~-")
    return pair[0][: pair.start(3) - pair.start()] + HIDDEN if is_secret(key) else pair[0]


def _whole_pairs(argv: list[str]) -> list[str]:
    """The words, with the value of a secret `--key value` hidden: no single word shows that."""
    keys = [word.lstrip("-") for word in argv]
    return [
        HIDDEN if i and argv[i - 1].startswith("--") and is_secret(keys[i - 1]) else word
        for i, word in enumerate(argv)
    ]


def _git(*args: str, where: Path) -> str | None:
    """What a git command prints, up to DIFF_BYTES; None where it fails or takes too long."""
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        with subprocess.Popen(["git", "-C", str(where), *args], env=env, **pipes) as process:
            timer = threading.Timer(GIT_TIMEOUT_S, process.kill)
            timer.start()
            output = process.stdout.read(DIFF_BYTES + 1)
            cut = len(output) > DIFF_BYTES
            if cut:
                process.kill()
            failed = process.wait() != 0
            timer.cancel()
    except OSError:
        return None
    text = output[:DIFF_BYTES].decode(errors="replace").strip("\n")
    if cut:
        return text + f"\n# cut here, after {DIFF_BYTES:,} bytes"
    return None if failed else text


def _devices() -> list[str]:
    # Not imported here: where torch is not loaded yet nothing has been computed on a device either.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in found]


def _packages() -> dict[str, str]:
    """By the names of their folders: reading what is inside takes a tenth of a second."""
    folders = (f for place in sys.path if place for f in Path(place).glob("*-*.dist-info"))
    found = (f.name.removesuffix(".dist-info").split("-", 1) for f in folders)
    return dict(sorted((name, version) for name, version in found))


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:
        return None
