"""The files of an image folder as a compact table, scanned once a node and mapped by workers.

A Python list of paths is copied page by page into every worker, since reading an object counts its
references; three arrays are not.
"""

import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock

ARRAYS = ("names", "ends", "labels")
# Formats that PIL tells by name but cannot decode.
NOT_DECODED = {"BUFR", "GRIB", "HDF5", "MPEG"}


@dataclass(frozen=True)
class Table:
    """Image files below a folder, by class and then by path.

    root: the folder. names: the files' paths below it, joined, uint8; file i ends at ends[i], int64
    [n]. labels: int32 [n], the class folder's place in `classes`; -1 where it has none. left_out:
    how many files of which kind are no samples. folders: each one's time of change in nanoseconds.
    """

    root: bytes
    names: np.ndarray
    ends: np.ndarray
    labels: np.ndarray
    classes: list[bytes] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    folders: dict[bytes, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> bytes:
        start = self.ends[index - 1] if index else 0
        return os.path.join(self.root, self.names[start : self.ends[index]].tobytes())


def scan(root: str | bytes, by_class: bool) -> Table:
    """Reads a folder: each folder in it a class, or, with by_class false, one tree without labels.

    Hidden files and folders and empty files are no samples. Raises OSError for a closed folder.
    """
    root, suffixes = os.fsencode(root), image_suffixes()
    left_out, folders = Counter(), {}
    classes, names, labels = [], [], []
    if by_class:
        folders[root] = os.stat(root).st_mtime_ns
        for entry in sorted(os.scandir(root), key=lambda e: e.name):
            if is_hidden(entry.name):
                left_out["hidden"] += 1
            elif entry.is_dir():
                classes.append(entry.name)
            else:
                left_out["outside of a class folder"] += 1
    for label, name in enumerate(classes) if by_class else [(-1, b"")]:
        top = os.path.join(root, name)
        found = sorted(_images(top, name, suffixes, left_out, folders, ()))
        names += found
        labels.append(np.full(len(found), label, np.int32))
    return Table(
        root,
        np.frombuffer(b"".join(names), np.uint8),
        np.cumsum([len(name) for name in names], dtype=np.int64),
        np.concatenate([np.empty(0, np.int32), *labels]),
        classes,
        dict(left_out),
        folders,
    )


def _images(
    folder: bytes, below: bytes, suffixes: tuple, left_out: Counter, folders: dict, above: tuple
) -> Iterator[bytes]:
    """Paths of the image files in a folder's tree, `below` in front; no link leads back up."""
    status = os.stat(folder)
    here = status.st_dev, status.st_ino
    if here in above:
        return
    folders[folder] = status.st_mtime_ns
    for entry in os.scandir(folder):
        path = os.path.join(below, entry.name)
        if is_hidden(entry.name):
            left_out["hidden"] += 1
        elif entry.is_dir():
            yield from _images(entry.path, path, suffixes, left_out, folders, (*above, here))
        elif not entry.name.lower().endswith(suffixes):
            left_out["other files"] += 1
        elif entry.is_file() and entry.stat().st_size == 0:
            left_out["empty"] += 1
        else:
            yield path  # a dangling link too: reading it names it


def is_hidden(name: bytes) -> bool:
    return name.startswith(b".") or name == b"__MACOSX"


def image_suffixes() -> tuple[bytes, ...]:
    """Suffixes of the files that PIL reads, in lower case."""
    from PIL import Image

    known = Image.registered_extensions()
    return tuple(
        suffix.encode() for suffix, kind in known.items() if kind in Image.OPEN.keys() - NOT_DECODED
    )


# ---- once a node ---------------------------------------------------------------------------------


def cached(root: str | bytes, by_class: bool) -> Table:
    """The table of a folder, from the cache while none of its folders has changed since the scan.

    Processes of a node wait for the one that scans; without a cache to write to, each scans.
    """
    root = os.path.realpath(os.fsencode(root))
    try:
        folder = cache_folder()
        key = hashlib.sha256(root + bytes([by_class])).hexdigest()[:32]
        with FileLock(folder / f"{key}.lock"):
            return _load(folder, key, root) or _keep(folder, key, scan(root, by_class))
    except (OSError, NotImplementedError):  # read-only, full, or a file system without locks
        return scan(root, by_class)


def cache_folder() -> Path:
    """A folder that only this user writes. Raises OSError where there is none."""
    home = os.environ.get("XDG_CACHE_HOME")
    temporary = Path(tempfile.gettempdir(), f"meshwork-{os.getuid()}")
    folder = Path(home, "meshwork") if home else temporary
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not ours or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by others")
    return folder


def _keep(folder: Path, key: str, table: Table) -> Table:
    """Writes a table: arrays under new names, then, in one move, the page that names them."""
    if time.time() - max(table.folders.values(), default=0) / 1e9 < 2:
        return table  # a file added within the same tick of the clock would go unseen
    stamp = secrets.token_hex(8)
    page = {
        "stamp": stamp,
        "classes": [os.fsdecode(name) for name in table.classes],
        "left_out": table.left_out,
        "folders": {os.fsdecode(name): changed for name, changed in table.folders.items()},
    }
    old = [p for p in folder.glob(f"{key}-*") if p.suffix == ".npy"]
    try:
        for name in ARRAYS:
            np.save(folder / f"{key}-{stamp}-{name}.npy", getattr(table, name))
        (folder / f"{key}-{stamp}.json").write_text(json.dumps(page))
        os.replace(folder / f"{key}-{stamp}.json", folder / f"{key}.json")
    except OSError:
        old = list(folder.glob(f"{key}-{stamp}*"))
        return table
    finally:
        for path in old:
            path.unlink(missing_ok=True)
    return _load(folder, key, table.root) or table


def _load(folder: Path, key: str, root: bytes) -> Table | None:
    try:
        page = json.loads((folder / f"{key}.json").read_text())
        folders = {os.fsencode(name): changed for name, changed in page["folders"].items()}
        if any(os.stat(name).st_mtime_ns != changed for name, changed in folders.items()):
            return None
        files = {name: folder / f"{key}-{page['stamp']}-{name}.npy" for name in ARRAYS}
        arrays = {n: np.asarray(np.load(p, mmap_mode="r")) for n, p in files.items()}
    except (OSError, ValueError, KeyError, EOFError):
        return None
    classes = [os.fsencode(name) for name in page["classes"]]
    return Table(root, **arrays, classes=classes, left_out=page["left_out"], folders=folders)
