"""Reads the folders of torch.distributed.checkpoint so that nothing in them can run code."""

import io
import pickle
import warnings
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

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
            causes = [cause for cause, _ in e.failures.values()]
            said = [cause for cause in causes if isinstance(cause, ConfigError)]
            raise (said or causes)[0] from e
