"""Predictions of a trained model, one line a sample: predictions.csv."""

import csv
import heapq
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from meshwork.config import ConfigError, Failure
from meshwork.data.loader import Step
from meshwork.distributed import World
from meshwork.parallel.engine import Engine

TEXT = {"newline": "", "encoding": "utf-8", "errors": "surrogateescape"}


def predict(
    engine: Engine,
    batches: Iterable,
    steps: list[Step],
    dataset: Any,
    classes: tuple[str, ...],
    world: World,
    stop: Callable[[], bool],
    folder: Path,
) -> tuple[int, list[tuple[str, str]]]:
    """Write folder/predictions.csv: path, label, and the probability of each class.

    Returns the number of lines, and (path, reason) of images that could not be read: this rank's,
    on rank 0 all. batches, steps: this rank's, in the same order. path: of the file, or the
    sample's index where the data set has none. Each rank writes its part, rank 0 joins them in the
    order of the samples. Raises Failure where `stop()` asks to leave.
    """
    part = folder / f".predictions.rank{world.ranks.rank}"
    engine.train(False)
    n, bad = 0, []
    with open(part, "w", **TEXT) as file:
        writer = csv.writer(file)
        for step, batch in zip(steps, batches, strict=True):
            if stop():
                raise Failure("asked to stop: predictions.csv is not written")
            world.beat("predict")
            bad += batch.bad
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
    engine.train()
    gathered = world.to_main((n, bad))
    if gathered is not None:
        names = list(classes) or [f"class_{i}" for i in range(shares.shape[1])]
        _join(folder, ["path", "label", *names], world.ranks.world_size)
        n, bad = sum(n for n, _ in gathered), [b for _, bs in gathered for b in bs]
    return n, bad


def _line(dataset: Any, index: int, shares: torch.Tensor, classes: tuple[str, ...]) -> list:
    best = int(shares.argmax())
    return [
        _path(dataset, index),
        classes[best] if classes else best,
        *(f"{p:.6g}" for p in shares.tolist()),
    ]


def _path(dataset: Any, index: int) -> str | int:
    try:
        return dataset.path(index)
    except AttributeError:  # a part of a data set has the method, its whole may not
        return index


def _join(folder: Path, header: list[str], ranks: int) -> None:
    parts = [folder / f".predictions.rank{r}" for r in range(ranks)]
    files = [open(p, **TEXT) for p in parts]
    with open(folder / "predictions.csv", "w", **TEXT) as out:
        writer = csv.writer(out)
        writer.writerow(header)
        for row in heapq.merge(*map(csv.reader, files), key=lambda row: int(row[0])):
            writer.writerow(row[1:])
    for file, part in zip(files, parts, strict=True):
        file.close()
        part.unlink()
