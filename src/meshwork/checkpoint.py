"""Checkpoints: tensors by the bare model's names through torch.distributed.checkpoint, the rest as
JSON.

A checkpoint is a folder step_<n>: torch's files, and state.json, written last, which marks it
complete.
"""

import io
import json
import pickle
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from meshwork.config import ConfigError
from meshwork.data.order import VERSION
from meshwork.distributed import World
from meshwork.parallel.engine import Engine

MARKER = "state.json"


@dataclass
class Position:
    """Where a run stands.

    step: finished updates. samples: seen so far, a running total. epoch, offset: the next sample of
    the data's order.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    offset: int = 0


def _tensors(engine: Engine, optimizer: torch.optim.Optimizer, rank: int) -> dict[str, Tensor]:
    """Everything of this rank to be saved, by flat name."""
    found = {f"model.{k}": v for k, v in engine.module.state_dict().items() if torch.is_tensor(v)}
    for name, parameter in engine.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    found[f"rng.{rank}.cpu"] = torch.get_rng_state()
    if engine.world.device.type == "cuda":
        found[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(engine.world.device)
    return found


def save(
    folder: Path,
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    position: Position,
    world: World,
    facts: dict,
) -> Path:
    """Save to folder/step_<n>; all ranks call it. facts: plain values kept beside the position.

    Written to a temporary folder, renamed when every rank has written and the marker stands.
    """
    final = folder / f"step_{position.step}"
    partial = folder / f".step_{position.step}.partial"
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.from_main(None)
    engine.sync_buffers()
    tensors = _tensors(engine, optimizer, world.ranks.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process saves without a process group on purpose
        dcp.save(
            tensors,
            storage_writer=FileSystemWriter(partial),
            process_group=world.saving,
            no_dist=world.saving is None,
        )
    if world.is_main:
        scaler = engine.scaler.state_dict() if engine.scaler is not None else None
        state = {**asdict(position), **facts, "order_version": VERSION, "scaler": scaler}
        (partial / MARKER).write_text(json.dumps(state, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    world.from_main(None)
    return final


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints of a run or checkpoints folder, oldest first."""
    places = [folder, folder / "checkpoints"]
    found = [p for place in places for p in place.glob("step_*") if (p / MARKER).exists()]
    return sorted(found, key=lambda p: int(p.name.split("_")[1]))


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, or the folder itself where it is one."""
    if (folder / MARKER).exists():
        return folder
    return (complete(folder) or [None])[-1]


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove all but the newest `keep` checkpoints and the one named `best`; rank 0 alone calls
    it."""
    for old in complete(folder)[:-keep]:
        if old.name != best:
            shutil.rmtree(old, ignore_errors=True)
    for leftover in folder.glob(".step_*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


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


def _entries(path: Path) -> dict[str, TensorStorageMetadata]:
    return TensorReader(path).read_metadata().state_dict_metadata


def _read(path: Path, tensors: dict[str, Tensor], world: World | None) -> None:
    group = world.saving if world else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            tensors, storage_reader=TensorReader(path), process_group=group, no_dist=group is None
        )


def read_model(path: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint by the bare model's names, whole tensors on the CPU."""
    entries = {k: v for k, v in _entries(path).items() if k.startswith("model.")}
    tensors = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in entries.items()}
    _read(path, tensors, None)
    return {k.removeprefix("model."): v for k, v in tensors.items()}


def load(
    path: Path, engine: Engine, optimizer: torch.optim.Optimizer | None, world: World
) -> tuple[Position, dict]:
    """Load a checkpoint into engine and optimizer; all ranks call it.

    Returns the position and what stands beside it. Without an optimizer the weights alone are
    loaded. Raises ConfigError listing names and shapes that do not match.
    """
    try:
        state = json.loads((path / MARKER).read_text())
        position = Position(**{k: state[k] for k in asdict(Position())})
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"{path / MARKER} cannot be read: {e}") from e
    entries = _entries(path)
    own = engine.module.state_dict()
    saved = {k.removeprefix("model.") for k in entries if k.startswith("model.")}
    wrong = [f"{k} is missing" for k in own if k not in saved]
    wrong += [f"{k} is not in this model" for k in saved if k not in own]
    wrong += [
        f"{k} has shape {list(entries[f'model.{k}'].size)}, here {list(v.shape)}"
        for k, v in own.items()
        if k in saved and entries[f"model.{k}"].size != v.shape
    ]
    if wrong:
        raise ConfigError(
            f"{path} does not fit this model: {'; '.join(wrong[:6])} ({len(wrong)} in all): "
            "choose the model it was saved from"
        )
    tensors = {f"model.{k}": v for k, v in own.items()}
    moments: dict[str, dict[str, Tensor]] = {}
    if optimizer is not None:
        tensors |= _optimizer_targets(entries, engine, moments)
        tensors |= _rng_targets(entries, world.ranks.rank)
    _read(path, tensors, world)
    engine.module.load_state_dict({k: tensors[f"model.{k}"] for k in own})
    if optimizer is not None:
        parameters = dict(engine.named_parameters())
        for name, values in moments.items():
            optimizer.state[parameters[name]] = values
        _set_rng(tensors, world)
        if engine.scaler is not None and state.get("scaler"):
            engine.scaler.load_state_dict(state["scaler"])
    return position, state


def _optimizer_targets(entries: dict, engine: Engine, moments: dict) -> dict[str, Tensor]:
    """Empty tensors for the saved optimizer state: moments lie where their parameter lies."""
    found = {}
    for name, parameter in engine.named_parameters():
        prefix = f"optimizer.{name}."
        for key in (k for k in entries if k.startswith(prefix)):
            entry = entries[key]
            same = entry.size == parameter.shape
            device = parameter.device if same else "cpu"
            value = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
            found[key] = value
            moments.setdefault(name, {})[key.removeprefix(prefix)] = value
    return found


def _rng_targets(entries: dict, rank: int) -> dict[str, Tensor]:
    """Random states of this rank, where the checkpoint has them (not after the ranks have
    changed)."""
    return {
        k: torch.empty(v.size, dtype=torch.uint8)
        for k, v in entries.items()
        if k.startswith(f"rng.{rank}.")
    }


def _set_rng(tensors: dict[str, Tensor], world: World) -> None:
    rank = world.ranks.rank
    if (state := tensors.get(f"rng.{rank}.cpu")) is not None:
        torch.set_rng_state(state)
    if world.device.type == "cuda" and (state := tensors.get(f"rng.{rank}.cuda")) is not None:
        torch.cuda.set_rng_state(state, world.device)


def find(resume: str, folder: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means; None starts afresh.

    resume: auto (newest of the run's own folder), never, or the path of a run or checkpoint.
    Raises ConfigError where a path holds no complete checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return newest(folder)
    found = newest(Path(resume)) if Path(resume).is_dir() else None
    if found is None:
        state = "holds no complete checkpoint" if Path(resume).exists() else "does not exist"
        raise ConfigError(
            f"checkpoint.resume={resume} {state}: expected a run folder, or a folder step_<n> "
            f"with {MARKER}"
        )
    return found
