"""The files of torch.distributed.checkpoint: written with the crc32 of each, read so that nothing
in them can run code."""

import io
import pickle
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from meshwork.config import ConfigError
from meshwork.distributed import World

METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
}


class _OnlyMetadata(pickle.Unpickler):
    """Reads torch's checkpoint metadata and nothing that could run code."""

    def find_class(self, module: str, name: str) -> object:
        if module in ("pathlib", "pathlib._local"):  # where it was saved, by Python's version
            return PurePosixPath
        known = name in METADATA_CLASSES.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


class TensorReader(FileSystemReader):
    """Torch's reader, restricted: a checkpoint from a stranger cannot run code.

    Raises ConfigError naming the file where the metadata holds anything but tensors.
    """

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            found = _OnlyMetadata(io.BytesIO(file.read_bytes())).load()
        except FileNotFoundError as e:
            raise ConfigError(f"{self.path} is no checkpoint: {file} is missing") from e
        except Exception as e:
            raise ConfigError(f"{file} is refused: it is no metadata of tensors alone ({e})") from e
        entries = getattr(found, "state_dict_metadata", None)
        if not isinstance(found, Metadata) or not isinstance(entries, dict):
            raise ConfigError(f"{file} is refused: it holds no metadata of tensors")
        wrong = [k for k, v in entries.items() if not isinstance(v, TensorStorageMetadata)]
        if wrong:
            raise ConfigError(f"{file} is refused: {wrong[0]} is no tensor")
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future:
        """Raises ConfigError naming the file that does not hold the tensors it is to hold."""
        for file in sorted({self._file(item) for item in plan.items}):
            items = [i for i in plan.items if self._file(i) == file]
            try:
                super().read_data(replace(plan, items=items), planner)
            except Exception as e:
                reason = (str(e).strip() or type(e).__name__).splitlines()[0]
                raise ConfigError(f"{Path(self.path) / file} cannot be read: {reason}") from e
        return super().read_data(replace(plan, items=[]), planner)

    def _file(self, item: ReadItem) -> str:
        return self.storage_data[item.storage_index].relative_path


class _Counted:
    """A file open for writing, with the size and crc32 of what went into it, and what failed."""

    def __init__(self, file: io.IOBase):
        self.file, self.size, self.crc = file, 0, 0
        self.error: OSError | None = None
        self.tell, self.flush = file.tell, file.flush
        self.fileno, self.close = file.fileno, file.close

    def write(self, data: bytes) -> int:
        self.crc, self.size = zlib.crc32(data, self.crc), self.size + len(data)
        try:
            return self.file.write(data)
        except OSError as e:
            self.error = e
            raise


class _CountedFiles(FileSystem):
    """torch's file system; written: {name: [size, crc32]} of the files it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, list[int]] = {}

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[io.IOBase | _Counted]:
        with super().create_stream(path, mode) as file:
            counted = _Counted(file)
            try:
                yield counted
            except Exception as e:  # torch.save covers the cause with an error of its own
                raise counted.error or e from e
        self.written[Path(path).name.removesuffix(".tmp")] = [counted.size, counted.crc]


def write_from(path: Path, tensors: dict[str, Tensor], world: World) -> dict[str, list[int]]:
    """Write tensors into a checkpoint folder by name; all ranks call it.

    Returns {file: [size, crc32]} of what this rank has written. Raises what writing raised, on any
    rank, on all of them.
    """
    writer = FileSystemWriter(path)
    writer.fs = _CountedFiles()
    group, before = world.saving, get_crc32_options()
    set_crc32_options(False)  # ours cover the whole file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one process saves without a process group on purpose
            dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as e:
        raise _first_cause(e, OSError) from e
    finally:
        set_crc32_options(before)
    return writer.fs.written


def entries_of(path: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint folder, by name: size and dtype."""
    return TensorReader(path).read_metadata().state_dict_metadata


def read_into(path: Path, tensors: dict[str, Tensor], world: World | None) -> None:
    """Fill tensors from a checkpoint folder by name; with a world all ranks call it."""
    group = world.saving if world else None
    reader = TensorReader(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as e:
            raise _first_cause(e, ConfigError) from e


def _first_cause(error: CheckpointException, kind: type) -> BaseException:
    """What the first rank raised; of this kind where any rank did."""
    causes = [cause for cause, _ in error.failures.values()]
    return next((cause for cause in causes if isinstance(cause, kind)), causes[0])
