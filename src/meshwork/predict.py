"""Predictions of a trained model, one line a sample: predictions.csv."""

import csv
import heapq
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from meshwork.config import ConfigError
from meshwork.data.loader import Step
from meshwork.distributed import World
from meshwork.parallel.engine import Engine


def predict(
    engine: Engine,
    batches: Iterable,
    steps: list[Step],
    dataset: Any,
    classes: tuple[str, ...],
    world: World,
    folder: Path,
) -> int:
    """Write folder/predictions.csv: path, label, and the probability of each class; returns its
    lines.

    batches, steps: this rank's, in the same order. path: of the file, or the sample's index where
    the data set has none. Each rank writes its part, rank 0 joins them in the order of the samples.
    """
    part = folder / f".predictions.rank{world.ranks.rank}"
    engine.train(False)
    n = 0
    with open(part, "w", newline="", errors="surrogateescape") as file:
        writer = csv.writer(file)
        for step, batch in zip(steps, batches, strict=True):
            output = engine.predict(batch.to(world.device, engine.dtype))
            if output is None or not engine.counts:
                continue
            if not torch.is_tensor(output) or output.ndim != 2:
                raise ConfigError(
                    "mode=predict writes class probabilities: expected model outputs [n, classes], "
                    f"found {type(output).__name__}; write your own loop over engine.predict"
                )
            shares = output.float().softmax(dim=1).cpu()
            for row, index in enumerate(step.indices.tolist()):
                if batch.weight[row] > 0:
                    writer.writerow([index, *_line(dataset, index, shares[row], classes)])
                    n += 1
    counts = world.to_main(n)
    if world.is_main:
        names = list(classes) or [f"class_{i}" for i in range(engine_width(shares))]
        _join(folder, ["path", "label", *names], world.ranks.world_size)
        n = sum(counts)
    engine.train()
    return world.from_main(n)


def engine_width(shares: torch.Tensor) -> int:
    """Number of classes of the last output."""
    return shares.shape[1]


def _line(dataset: Any, index: int, shares: torch.Tensor, classes: tuple[str, ...]) -> list:
    best = int(shares.argmax())
    path = dataset.path(index) if hasattr(dataset, "path") else index
    return [path, classes[best] if classes else best, *(f"{p:.6g}" for p in shares.tolist())]


def _join(folder: Path, header: list[str], ranks: int) -> None:
    parts = [folder / f".predictions.rank{r}" for r in range(ranks)]
    files = [open(p, newline="", errors="surrogateescape") for p in parts]
    with open(folder / "predictions.csv", "w", newline="", errors="surrogateescape") as out:
        writer = csv.writer(out)
        writer.writerow(header)
        for row in heapq.merge(*map(csv.reader, files), key=lambda row: int(row[0])):
            writer.writerow(row[1:])
    for file, part in zip(files, parts, strict=True):
        file.close()
        part.unlink()
