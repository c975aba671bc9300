"""Checkpoints: tensors by the bare model's names through torch.distributed.checkpoint, the rest as
JSON. checkpoint_files.py knows their folders.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwork import config
from meshwork.checkpoint_files import DiskFull, tidy, write
from meshwork.config import ConfigError
from meshwork.data.order import VERSION
from meshwork.distributed import World
from meshwork.ema import Ema
from meshwork.parallel.engine import Engine
from meshwork.parallel.fsdp import local, put, whole

# Plain numbers of an optimizer are saved as tensors; a suffix says what they were: step:int.
NUMBERS = {"bool": bool, "int": int, "float": float}
OVERHEAD = 1536  # bytes that a file holds beside those of a tensor
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


def _tensors(
    engine: Engine, optimizer: torch.optim.Optimizer, ema: Ema | None, rank: int
) -> dict[str, Tensor]:
    """Everything of this rank to be saved, by flat name."""
    found = {f"model.{k}": _saved(engine, k, v) for k, v in engine.state_dict().items()}
    if ema is not None:
        found |= {f"ema.{k}": _saved(engine, k, v) for k, v in ema.weights.items()}
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


def _bytes(engine: Engine, tensors: dict[str, Tensor]) -> int:
    """What this rank adds to the files of a checkpoint: of copies one is written."""
    first = engine.data_rank == 0 and engine.counts
    mine = [local(t) for t in tensors.values() if _first_copy(t, first)]
    return sum(t.numel() * t.element_size() + OVERHEAD for t in mine)


def _first_copy(tensor: Tensor, first: bool) -> bool:
    if not isinstance(tensor, DTensor):
        return first
    place = tensor.device_mesh.get_coordinate()
    return all(c == 0 for c, p in zip(place, tensor.placements, strict=True) if p.is_replicate())


class Saver:
    """Writes checkpoints of a run: at once, or from a copy while training goes on.

    folder: of the checkpoints. With checkpoint.async_save the tensors are copied to the host and
    written by a thread. All ranks call its methods.
    """

    def __init__(self, cfg: config.Checkpoint, folder: Path, world: World):
        self.folder, self.world, self.keep = folder, world, cfg.keep
        self.thread = ThreadPoolExecutor(1) if cfg.async_save else None
        self.stager: Any = None
        self.pending: Future | None = None

    def save(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
        position: Position,
        facts: dict,
    ) -> None:
        """Save to folder/step_<n>. facts: plain values kept beside the position.

        Raises DiskFull; in the background `finished` or the next call raises it.
        """
        self.wait()
        engine.sync_buffers()
        tensors = _tensors(engine, optimizer, ema, self.world.ranks.rank)
        scaler = engine.scaler.state_dict() if engine.scaler is not None else None
        state = {**asdict(position), **facts, "order_version": VERSION, "scaler": scaler}
        state["optimizer"] = type(optimizer).__name__
        given = self.folder, state, _bytes(engine, tensors), facts.get("best")
        if self.thread is None:
            path, self.pending = self._write(tensors, *given, self.world), Future()
            self.pending.set_result(path)
        else:
            tensors = self._copied(tensors)
            self.pending = self.thread.submit(self._write, tensors, *given, self.world.for_saving())

    def _write(
        self, tensors: dict, folder: Path, state: dict, n: int, best: dict | None, world: World
    ) -> Path:
        path = write(folder, tensors, state, n, world)
        if world.is_main:
            tidy(folder, self.keep, best)
        return path

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """On the host, out of reach of the next step; the memory of the last copy is used again."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        cuda = self.world.device.type == "cuda"
        self.stager = self.stager or DefaultStager(StagingOptions(cuda, False, False, cuda))
        return self.stager.stage(tensors)

    def finished(self) -> Path | None:
        """The checkpoint that has become complete since the last call, if any; no collective.

        Raises what writing raised, but for DiskFull, which all ranks meet together in `wait`.
        """
        if self.pending is None or not self.pending.done():
            return None
        if isinstance(self.pending.exception(), DiskFull):
            return None
        done, self.pending = self.pending, None
        return done.result()

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written, if any. Raises what writing raised."""
        done, self.pending = self.pending, None
        return done.result() if done is not None else None


def read_model(path: Path, kind: str = "model") -> dict[str, Tensor]:
    """Weights of a checkpoint by the bare model's names, whole tensors on the CPU.

    kind: model, or ema for the averages, which are none where the run kept none.
    """
    from meshwork.tensor_files import entries_of, read_into

    entries = {k: v for k, v in entries_of(path).items() if k.startswith(f"{kind}.")}
    tensors = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in entries.items()}
    read_into(path, tensors, None)
    return {k.removeprefix(f"{kind}."): v for k, v in tensors.items()}


def load(
    path: Path,
    state: dict,
    engine: Engine,
    optimizer: torch.optim.Optimizer | None,
    ema: Ema | None,
    world: World,
) -> None:
    """Load a checkpoint's tensors into engine, optimizer and EMA; all ranks call it.

    state: its plain values. Without an optimizer the weights alone are loaded. An EMA that was not
    saved starts from the weights. Raises ConfigError listing names and shapes that do not match.
    """
    from meshwork.tensor_files import entries_of, read_into

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
    averaged = ema.weights if ema is not None and _has_ema(entries, shapes) else {}
    tensors |= {f"ema.{k}": _target(engine, k, v) for k, v in averaged.items()}
    if optimizer is not None:
        tensors |= _rng_targets(entries, world.ranks.rank)
    read_into(path, tensors, world)
    for kind, values_of in (("model", own), ("ema", averaged)):
        for name, value in values_of.items():
            if (read := tensors[f"{kind}.{name}"]) is not value:
                put(value, read, engine.fused.get(name, 1))
    if ema is not None and not averaged:
        ema.reset(engine)
    if optimizer is not None:
        _set_optimizer(values, optimizer, engine)
        _set_rng(tensors, world)
        if engine.scaler is not None and state.get("scaler"):
            engine.scaler.load_state_dict(state["scaler"])


def _has_ema(entries: dict, names: Iterable[str]) -> bool:
    return any(f"ema.{name}" in entries for name in names)


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
