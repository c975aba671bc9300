"""The folders of checkpoints: written so that a torn one is never taken for a whole one.

step_<n>/ holds torch's files, state.json and, written last, complete.json with size and crc32 of
every file. It is written as .step_<n>.partial and renamed.
"""

import errno
import json
import os
import shutil
import zlib
from pathlib import Path

import torch
from torch import Tensor

from meshwork.config import ConfigError, Failure
from meshwork.distributed import World

MARKER, STATE, BEST = "complete.json", "state.json", "best.json"


class DiskFull(Failure):
    """No room for a checkpoint."""


def write(
    folder: Path, tensors: dict[str, Tensor], state: dict, n_bytes: int, world: World
) -> Path:
    """Write a checkpoint to folder/step_<step>; all ranks call it.

    state: plain values with `step`. n_bytes: what this rank adds to the files. Raises DiskFull, on
    all ranks, with no trace of it left on the disk.
    """
    from meshwork.tensor_files import write_from  # half a second that the first step need not wait

    final = folder / f"step_{state['step']}"
    partial = folder / f".{final.name}.partial"
    needed = int(world.sum(torch.tensor(n_bytes)))

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < needed:
            raise OSError(errno.ENOSPC, "no room")
        partial.mkdir()

    def clean() -> int:
        shutil.rmtree(partial, ignore_errors=True)
        return shutil.disk_usage(folder if folder.exists() else folder.parent).free

    def complete() -> None:
        text = json.dumps(state, indent=1)
        _write_through(partial / STATE, text)
        files = {name: facts for part in written for name, facts in part.items()}
        files[STATE] = [len(text.encode()), zlib.crc32(text.encode())]
        _write_through(partial / MARKER, json.dumps({"files": files}, indent=1))
        old = folder / f".{final.name}.old"
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)

    try:
        world.on_main(begin)
        written = world.to_main(write_from(partial, tensors, world))
        world.on_main(complete)
    except OSError as e:
        free = world.on_main(clean)
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            f"the disk is full: {final} needs {needed:,} bytes, {free:,} are free; earlier "
            "checkpoints are intact: make room, set checkpoint.keep lower, or choose another "
            "run.root"
        ) from e
    return final


def _write_through(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def problem(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Why a checkpoint cannot be used, if so; looks at every parts-th file's content."""
    try:
        files = json.loads((path / MARKER).read_text())["files"]
        for i, (name, (size, crc)) in enumerate(sorted(files.items())):
            file = path / name
            if file.stat().st_size != size:
                return f"{file} has {file.stat().st_size:,} bytes, expected {size:,}"
            if i % parts == part and _crc32(file) != crc:
                return f"{file} is damaged: its checksum differs"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        return f"{getattr(e, 'filename', None) or path / MARKER} cannot be read ({e})"
    return None


def _crc32(file: Path, chunk: int = 1 << 22) -> int:
    crc = 0
    with open(file, "rb") as f:
        while data := f.read(chunk):
            crc = zlib.crc32(data, crc)
    return crc


def problem_together(path: Path, world: World) -> str | None:
    """`problem`, its work dealt to the ranks; the same answer on all of them."""
    found = world.to_main(problem(path, world.ranks.rank, world.ranks.world_size))
    return world.from_main(next((f for f in found if f), None) if found else None)


def steps(folder: Path) -> list[Path]:
    """The checkpoints of a run or checkpoints folder, torn ones too, oldest first."""
    places = [folder, folder / "checkpoints"]
    found = [p for place in places for p in place.glob("step_*") if p.name[5:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints of a run or checkpoints folder, oldest first."""
    return [p for p in steps(folder) if (p / MARKER).exists()]


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, or the folder itself where it is one."""
    if (folder / MARKER).exists():
        return folder
    return (complete(folder) or [None])[-1]


def best(folder: Path) -> Path | None:
    """The best checkpoint of a run or checkpoints folder, by the run's objective."""
    for place in (folder / "checkpoints", folder):
        try:
            found = place / json.loads((place / BEST).read_text())["checkpoint"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if (found / MARKER).exists():
            return found
    return None


def tidy(folder: Path, keep: int, best_so_far: dict | None) -> None:
    """Write best.json and remove all but the newest `keep` checkpoints and the best; rank 0 alone
    calls it.

    best_so_far: step and metrics of the best validation.
    """
    kept = f"step_{best_so_far['step']}" if best_so_far else None
    if kept and (folder / kept / MARKER).exists():
        partial = folder / f".{BEST}"
        partial.write_text(json.dumps({"checkpoint": kept, **best_so_far}, indent=1) + "\n")
        partial.replace(folder / BEST)
    for old in complete(folder)[:-keep]:
        if old.name != kept:
            shutil.rmtree(old, ignore_errors=True)
    for leftover in (*folder.glob(".step_*.partial"), *folder.glob(".step_*.old")):
        shutil.rmtree(leftover, ignore_errors=True)


def read_state(path: Path) -> dict:
    """The plain values of a checkpoint. Raises ConfigError where the file is none of ours."""
    try:
        found = json.loads((path / STATE).read_text())
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        return found
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path / STATE} cannot be read: {type(e).__name__}: {e}") from e


def put_aside(path: Path) -> None:
    """Rename a checkpoint that cannot be used, so that nothing takes it for one again."""
    aside = path.with_name(f"bad_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
