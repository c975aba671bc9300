"""Checkpoints: tensors by the bare model's names through torch.distributed.checkpoint, the rest as
JSON.

A checkpoint is a folder step_<n>: torch's files, and state.json, written last, which marks it
complete.
"""

import json
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwork.config import ConfigError
from meshwork.data.order import VERSION
from meshwork.distributed import World
from meshwork.parallel.engine import Engine
from meshwork.parallel.fsdp import put, whole

MARKER = "state.json"
# Plain numbers of an optimizer are saved as tensors; a suffix says what they were: step:int.
NUMBERS = {"bool": bool, "int": int, "float": float}
GROUP = "group/"  # in front of what an optimizer counts by group and not by parameter


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
    found = {f"model.{k}": _saved(engine, k, v) for k, v in engine.state_dict().items()}
    for name, values in _optimizer_values(engine, optimizer).items():
        for key, value in values.items():
            kind = "" if torch.is_tensor(value) else f":{type(value).__name__}"
            found[f"optimizer.{name}.{key}{kind}"] = _saved(engine, name, _as_tensor(value))
    found[f"rng.{rank}.cpu"] = torch.get_rng_state()
    if engine.world.device.type == "cuda":
        found[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state(engine.world.device)
    return found


def _saved(engine: Engine, name: str, value: Tensor) -> Tensor:
    """A tensor as it is saved: in full where its pieces do not lie in the bare model's order."""
    if value.shape != engine.shapes[name] or not _scattered(engine, name, value):
        return value
    return whole(value, engine.fused.get(name, 1))


def _scattered(engine: Engine, name: str, value: Tensor) -> bool:
    strided = any("Strided" in type(p).__name__ for p in getattr(value, "placements", ()))
    return isinstance(value, DTensor) and (name in engine.fused or strided)


def _as_tensor(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64 if type(value) is float else None)


def _optimizer_values(
    engine: Engine, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """Tensors and numbers of the optimizer's state, by parameter and by their own name.

    What groups count (timm's Lamb and Adan: the step) stands with each of their parameters.
    """
    found = {}
    known = {"params", "param_names", *optimizer.defaults}
    names = {p: n for n, p in engine.named_parameters()}
    for group in optimizer.param_groups:
        counts = {f"{GROUP}{k}": v for k, v in group.items() if k not in known}
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {}) | counts
            found[names[parameter]] = {
                k: v for k, v in values.items() if torch.is_tensor(v) or type(v) in NUMBERS.values()
            }
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
    import torch.distributed.checkpoint as dcp  # half a second that the first step need not wait

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
            storage_writer=dcp.FileSystemWriter(partial),
            process_group=world.saving,
            no_dist=world.saving is None,
        )
    if world.is_main:
        scaler = engine.scaler.state_dict() if engine.scaler is not None else None
        state = {**asdict(position), **facts, "order_version": VERSION, "scaler": scaler}
        state["optimizer"] = type(optimizer).__name__
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


def read_model(path: Path) -> dict[str, Tensor]:
    """Weights of a checkpoint by the bare model's names, whole tensors on the CPU."""
    from meshwork.tensor_reader import entries_of, read_into

    entries = {k: v for k, v in entries_of(path).items() if k.startswith("model.")}
    tensors = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in entries.items()}
    read_into(path, tensors, None)
    return {k.removeprefix("model."): v for k, v in tensors.items()}


def load(
    path: Path, engine: Engine, optimizer: torch.optim.Optimizer | None, world: World
) -> tuple[Position, dict]:
    """Load a checkpoint into engine and optimizer; all ranks call it.

    Returns the position and what stands beside it. Without an optimizer the weights alone are
    loaded. Raises ConfigError listing names and shapes that do not match.
    """
    from meshwork.tensor_reader import entries_of, read_into

    try:
        state = json.loads((path / MARKER).read_text())
        position = Position(**{k: int(state[k]) for k in asdict(Position())})
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise ConfigError(f"{path / MARKER} cannot be read: {type(e).__name__}: {e}") from e
    entries = entries_of(path)
    own, shapes = engine.state_dict(), engine.shapes
    saved = {k.removeprefix("model.") for k in entries if k.startswith("model.")}
    wrong = [f"{k} is missing" for k in shapes if k not in saved]
    wrong += [f"{k} is not in this model" for k in saved if k not in shapes]
    wrong += [
        f"{k} has shape {list(entries[f'model.{k}'].size)}, here {list(shape)}"
        for k, shape in shapes.items()
        if k in saved and entries[f"model.{k}"].size != shape
    ]
    if wrong:
        raise ConfigError(
            f"{path} does not fit this model: {'; '.join(wrong[:6])} ({len(wrong)} in all): "
            "choose the model it was saved from"
        )
    tensors = {f"model.{k}": _target(engine, k, v) for k, v in own.items()}
    kept = optimizer is not None and state.get("optimizer") == type(optimizer).__name__
    values = _optimizer_targets(entries, optimizer, engine) if kept else {}
    tensors |= values
    if optimizer is not None:
        tensors |= _rng_targets(entries, world.ranks.rank)
    read_into(path, tensors, world)
    for name, value in own.items():
        if (read := tensors[f"model.{name}"]) is not value:
            put(value, read, engine.fused.get(name, 1))
    if optimizer is not None:
        _set_optimizer(values, optimizer, engine)
        _set_rng(tensors, world)
        if engine.scaler is not None and state.get("scaler"):
            engine.scaler.load_state_dict(state["scaler"])
    return position, state


def _optimizer_targets(
    entries: dict, optimizer: torch.optim.Optimizer, engine: Engine
) -> dict[str, Tensor]:
    """Empty tensors for the saved optimizer state: moments lie where their parameter lies."""
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    parameters = {n: p for n, p in engine.named_parameters() if p in trained}
    found = {}
    for key, entry in entries.items():
        parameter = parameters.get(key.removeprefix("optimizer.").rpartition(".")[0])
        if key.startswith("optimizer.") and parameter is not None:
            if entry.size == parameter.shape:
                like = torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
                name = key.removeprefix("optimizer.").rpartition(".")[0]
                found[key] = _target(engine, name, like)
            else:
                found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return found


def _target(engine: Engine, name: str, value: Tensor) -> Tensor:
    """What a saved tensor is read into: the tensor itself, or all of it on the CPU."""
    if not _scattered(engine, name, value):
        return value
    return torch.empty(tuple(value.shape), dtype=value.dtype)


def _set_optimizer(
    values: dict[str, Tensor], optimizer: torch.optim.Optimizer, engine: Engine
) -> None:
    """Put loaded state in its place."""
    parameters = dict(engine.named_parameters())
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for full, value in values.items():
        name, _, key = full.removeprefix("optimizer.").rpartition(".")
        key, _, kind = key.partition(":")
        parameter = parameters[name]
        if _scattered(engine, name, parameter) and value.shape == parameter.shape:
            read, value = value, torch.empty_like(parameter.detach(), dtype=value.dtype)
            put(value, read, engine.fused.get(name, 1))
        place = groups[parameter] if key.startswith(GROUP) else optimizer.state[parameter]
        place[key.removeprefix(GROUP)] = NUMBERS[kind](value.item()) if kind else value


def _rng_targets(entries: dict, rank: int) -> dict[str, Tensor]:
    """Random states of this rank; a checkpoint of fewer ranks has none."""
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


def find(resume: str, folder: Path | None) -> Path | None:
    """The checkpoint that `checkpoint.resume` means; None starts afresh.

    resume: auto (newest of the run's own folder), never, or the path of a run or checkpoint.
    folder: of the run, None while it is not known.
    Raises ConfigError where a path holds no complete checkpoint.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return newest(folder) if folder is not None else None
    found = newest(Path(resume)) if Path(resume).is_dir() else None
    if found is None:
        state = "holds no complete checkpoint" if Path(resume).exists() else "does not exist"
        raise ConfigError(
            f"checkpoint.resume={resume} {state}: expected a run folder, or a folder step_<n> "
            f"with {MARKER}"
        )
    return found
