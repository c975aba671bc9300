"""Exact evaluation: every sample once, sums in float64, the same numbers on any number of ranks."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwork.batch import Batch, map_tensors
from meshwork.distributed import World
from meshwork.parallel.engine import Engine

WORST = 16


@dataclass
class Result:
    """metrics: {"val/loss": ..., ...}. totals: summed tensors by name, float64 on the CPU.

    worst: (loss, number, image [c, h, w], target, predicted class) of the samples with the largest
    loss, on rank 0. bad: (path, reason) of images that could not be read.
    """

    metrics: dict[str, float]
    totals: dict[str, Tensor]
    worst: list[tuple] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)


def summarize(totals: dict[str, Tensor]) -> dict[str, float]:
    """From sums to what is logged: means over the samples; tensors of more than one value are
    left."""
    found = {k: v / totals["count"] for k, v in totals.items() if v.ndim == 0 and k != "count"}
    found["loss"] = totals["loss"] / totals["weight"]
    found.pop("weight")
    return {**{k: v.item() for k, v in found.items()}, "count": int(totals["count"])}


def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    world: World,
    keep_worst: bool = False,
    prefix: str = "val",
    logger: Any = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result | None:
    """Loss and metrics of the task over an evaluation set; None where `stop()` broke it off.

    batches: this rank's, as many on every rank. A rank's sums are float64; one reduction at the
    end.
    """
    task = engine.task
    totals: dict[str, Tensor] = {}
    worst: list[tuple] = []
    numbers = itertools.count()
    bad: list[tuple[str, str]] = []
    engine.sync_buffers()
    engine.train(False)
    for number, batch in enumerate(batches):
        if stop():
            engine.train()
            return None
        world.beat(f"{prefix}, batch {number}", patient=number == 0)
        bad += batch.bad
        batch = batch.to(world.device, engine.dtype)
        output = engine.predict(batch)
        if output is None or not engine.counts:
            continue
        sums, losses, shown, output = _sums(engine, batch, output)
        for name, value in sums.items():
            totals[name] = totals[name] + value if name in totals else value
        if keep_worst and len(losses):
            _keep_worst(worst, numbers, losses, shown, output)
        if hasattr(task, "on_validation") and len(losses):
            task.on_validation(shown, output, logger)
    engine.train()
    totals = _reduce(totals, world)
    found = (task.summarize if hasattr(task, "summarize") else summarize)(totals)
    gathered = world.to_main((worst, bad))
    if gathered is not None:
        worst = heapq.nlargest(WORST, (w for ws, _ in gathered for w in ws), key=lambda w: w[:2])
        bad = [b for _, bs in gathered for b in bs]
    return Result({f"{prefix}/{k}": v for k, v in found.items()}, totals, worst, bad)


def _sums(
    engine: Engine, batch: Batch, output: Any
) -> tuple[dict[str, Tensor], Tensor, Batch, Any]:
    """Sums over the real rows of a batch, which come first; one of only padding gives zeros."""
    real = batch.weight > 0
    n = int(real.sum())
    rows = real.nonzero().flatten() if n else torch.zeros(1, dtype=torch.long, device=real.device)
    if n < len(batch):
        batch = batch.map(lambda t: t[rows])
        output = map_tensors(lambda t: t[rows], output)
    task = engine.task
    with engine.autocast():
        found = task.loss(output, batch)
        sums = task.metrics(output, batch) if hasattr(task, "metrics") else {}
    losses = _exact(found[0] if isinstance(found, tuple) else found)
    weight = _exact(task.weight(batch)) if hasattr(task, "weight") else torch.ones_like(losses)
    sums["loss"], sums["weight"] = losses.sum(), weight.sum()
    sums["count"] = torch.tensor(float(len(losses)))
    sums = {k: _exact(v) if n else torch.zeros_like(_exact(v)) for k, v in sums.items()}
    return sums, losses[:n], batch, output


def _exact(values: Tensor) -> Tensor:
    return values.cpu().double()  # in this order: not every device knows float64


def _keep_worst(
    worst: list[tuple], numbers: Iterator[int], losses: Tensor, batch: Batch, output: Any
) -> None:
    """Keep the samples with the largest loss, where inputs are images and outputs class scores."""
    image = batch.inputs[0]
    if not torch.is_tensor(output) or output.ndim != 2 or image.ndim != 4:
        return
    if not torch.is_tensor(batch.target) or batch.target.ndim != 1:
        return
    for i in losses.topk(min(WORST, len(losses))).indices.tolist():
        entry = (
            losses[i].item(),
            next(numbers),  # settles a tie
            image[i].float().cpu(),
            int(batch.target[i]),
            int(output[i].argmax()),
        )
        (heapq.heappush if len(worst) < WORST else heapq.heappushpop)(worst, entry)


def _reduce(totals: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Sum every total over the ranks: one flat float64 tensor.

    A rank that counts nothing learns from rank 0 what is summed.
    """
    known = world.to_main({n: t.shape for n, t in totals.items()})
    shapes = world.from_main(
        {n: s for one in known for n, s in sorted(one.items())} if known else None
    )
    parts = [totals.get(n, torch.zeros(s, dtype=torch.float64)) for n, s in shapes.items()]
    flat = world.sum(torch.cat([p.reshape(-1).cpu() for p in parts]))
    sizes = [p.numel() for p in parts]
    return {
        n: part.reshape(s) for (n, s), part in zip(shapes.items(), flat.split(sizes), strict=True)
    }
