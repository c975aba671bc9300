"""The files of an image folder as a compact table, scanned once a node and shared with workers.

A Python list of paths is copied page by page into every worker, since reading an object counts its
references; three arrays are not.
"""

import hashlib
import json
import os
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from filelock import FileLock

SUFFIXES = tuple(
    b".jpg .jpeg .jpe .jfif .png .gif .bmp .webp .tif .tiff .ppm .pgm .pbm .pnm .tga .ico .jp2 "
    b".avif".split()
)


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
    root, left_out, folders = os.fsencode(root), Counter(), {}
    found = _images(root, b"", left_out, folders, ())
    parts = sorted(path.split(b"/", 1) for path in found)
    classes, labels = [], [-1] * len(parts)
    if by_class:
        left_out["outside of a class folder"] += sum(len(part) == 1 for part in parts)
        parts = [part for part in parts if len(part) == 2]
        classes = sorted(e.name for e in os.scandir(root) if e.is_dir() and not is_hidden(e.name))
        label_of = {name: label for label, name in enumerate(classes)}
        labels = [label_of[name] for name, _ in parts]
    paths = [b"/".join(part) for part in parts]
    return Table(
        root,
        np.frombuffer(b"".join(paths), np.uint8),
        np.cumsum([len(path) for path in paths], dtype=np.int64),
        np.array(labels, np.int32),
        classes,
        {kind: n for kind, n in left_out.items() if n},
        folders,
    )


def _images(
    folder: bytes, below: bytes, left_out: Counter, folders: dict, above: tuple
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
            yield from _images(entry.path, path, left_out, folders, (*above, here))
        elif not entry.name.lower().endswith(SUFFIXES):
            left_out["other files"] += 1
        elif entry.is_file() and entry.stat().st_size == 0:
            left_out["empty"] += 1
        else:
            yield path  # a dangling link too: reading it names it


def is_hidden(name: bytes) -> bool:
    return name.startswith(b".") or name == b"__MACOSX"


# ---- once a node ---------------------------------------------------------------------------------


def cached(root: str | bytes, by_class: bool) -> Table:
    """The table of a folder, from the cache while none of its folders has changed since the scan.

    Processes of a node wait for the one that scans; without a cache to write to, each scans.
    """
    root = os.path.realpath(os.fsencode(root))
    try:
        file = cache_folder() / f"{hashlib.sha256(root + bytes([by_class])).hexdigest()[:32]}.npz"
        with FileLock(file.with_suffix(".lock")):
            if (table := _load(file, root)) is None:
                table = scan(root, by_class)
                _keep(file, table)
            return table
    except (OSError, NotImplementedError):  # read-only, full, or a file system without locks
        return scan(root, by_class)


def cache_folder() -> Path:
    """This user's folder for what processes share. Raises OSError where there is none."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home, "meshwork")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _keep(file: Path, table: Table) -> None:
    if time.time() - max(table.folders.values(), default=0) / 1e9 < 2:
        return  # a file added within the same tick of the clock would go unseen
    page = {
        "classes": [os.fsdecode(name) for name in table.classes],
        "left_out": table.left_out,
        "folders": {os.fsdecode(name): changed for name, changed in table.folders.items()},
    }
    arrays = {"names": table.names, "ends": table.ends, "labels": table.labels}
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        np.savez(Path(place, file.name), page=json.dumps(page), **arrays)
        os.replace(Path(place, file.name), file)


def _load(file: Path, root: bytes) -> Table | None:
    try:
        with np.load(file) as found:
            page = json.loads(str(found["page"]))
            arrays = {name: found[name] for name in ("names", "ends", "labels")}
        folders = {os.fsencode(name): changed for name, changed in page["folders"].items()}
        if any(os.stat(name).st_mtime_ns != changed for name, changed in folders.items()):
            return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    classes = [os.fsencode(name) for name in page["classes"]]
    return Table(root, **arrays, classes=classes, left_out=page["left_out"], folders=folders)
