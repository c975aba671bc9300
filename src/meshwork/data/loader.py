"""From the order of the data to batches: which rows a rank takes, how they are read, the loader.

Order, padding and augmentation follow from (seed, epoch, index) alone: batches are the same for any
number of workers, and joined over the ranks the same for any number of ranks.
"""

import random
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate

from meshwork.batch import Batch, BatchPlan, map_tensors
from meshwork.config import ConfigError
from meshwork.data.order import mixed, permuted

BLOCK = 2048  # samples whose order is looked up at once: 0.2 us each, where one alone takes 200
WORKER_GRACE_S = 60  # a loader worker told to end serves on for so long
IN_A_ROW = 100  # images that may be bad
# What a worker's end looks like, and what to do about it.
ENDED = {
    r"killed by signal: (Killed|9)|exited unexpectedly": (
        "a loader worker was killed, most likely because memory ran out (dmesg tells): set a "
        "smaller data.workers or trainer.micro_batch_size, or ask for more memory"
    ),
    "Bus error": (
        "a loader worker ran out of shared memory (/dev/shm): give the container more "
        "(docker run --ipc=host), or set data.workers=0"
    ),
    "timed out": (
        "a loader worker gave no batch in time: is the file system of data.root slow or gone? "
        "Set data.workers=0 to see where it waits, or a larger runtime.timeout_s"
    ),
}


@dataclass(frozen=True)
class Step:
    """The samples of one rank for one step.

    indices: int64, the rank's real rows. padded: rows to give, copies included. total: samples of
    the step over all ranks. start: position of the step's first sample in its epoch.
    """

    epoch: int
    start: int
    indices: np.ndarray
    padded: int
    total: int


class BadImage(Exception):
    """An image that cannot be read; a data set raises BadImage(path, reason)."""

    def __init__(self, path: str, reason: str | None = None):
        text = f"cannot read the image {path}: {reason}"
        if reason is None:  # torch makes a worker's error again from its traceback: last line
            text = path.strip().splitlines()[-1].rpartition("BadImage: ")[2]
        super().__init__(text)
        self.path, self.reason = path, reason


# ---- which rows ----------------------------------------------------------------------------------


def step_size(n: int, plan: BatchPlan, offset: int, drop_last: bool) -> int:
    """Samples of the step at a position of an epoch of n samples; 0 where the epoch has ended.

    Where drop_last is false the last step takes what is left, in whole micro-batches where the
    model couples samples: those are never padded.
    """
    left = min(plan.global_batch, n - offset)
    unit = plan.global_batch if drop_last else plan.micro if plan.coupled else 1
    return left // unit * unit


def train_steps(
    n: int, plan: BatchPlan, rank: int, seed: int, epoch: int, offset: int, drop_last: bool
) -> Iterator[Step]:
    """Steps of a data rank without end, from the sample at `offset` of an epoch on."""
    if step_size(n, plan, 0, drop_last) == 0:
        raise ConfigError(
            f"{n} training samples give no step of trainer.global_batch_size={plan.global_batch}: "
            f"set trainer.global_batch_size={max(n, 1)} or less, or data.drop_last=false"
        )
    steps_a_block = max(1, BLOCK // plan.padded)
    while True:
        block = []  # (start, size, this rank's positions) of the next steps
        while len(block) < steps_a_block and (size := step_size(n, plan, offset, drop_last)):
            rows = plan.rows(rank, size)
            block.append((offset, size, np.arange(offset + rows.start, offset + rows.stop)))
            offset += size
        if not block:
            epoch, offset = epoch + 1, 0
            continue
        samples = permuted(np.concatenate([positions for *_, positions in block]), n, seed, epoch)
        for start, size, positions in block:
            indices, samples = np.split(samples, [len(positions)])
            yield Step(epoch, start, indices, plan.padded, size)


def eval_steps(n: int, size: int, rank: int, ranks: int) -> list[Step]:
    """Steps of a rank, `size` rows each, that together over all ranks hold each of n samples once.

    Every rank has the same number of them; where a rank has nothing left, all its rows are padding.
    """
    steps = []
    for start in range(0, n, size * ranks):
        first = min(n, start + size * rank)
        indices = np.arange(first, min(n, first + size))
        steps.append(Step(0, start, indices, size, min(size * ranks, n - start)))
    return steps


# ---- from rows to a batch ------------------------------------------------------------------------


class Samples:
    """A data set seen step by step: `samples[step]` is the rank's `Batch`.

    dataset: `dataset[index]` gives a pair (input or tuple of inputs, target) or a dict: what
    `inputs` names in it (none: the first entry) are the model's inputs, the rest is the target (a
    single one without its name). transform: applied to inputs that are PIL images; tensors pass.
    train: Python, numpy and torch are seeded for each sample from (seed, epoch, index, draw), but
    where transform and dataset both say `draws = False`; `draw` counts stand-ins. on_bad_image:
    raise, or skip: in training the next good sample stands in, in evaluation the row weighs 0.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Image.Image], torch.Tensor],
        seed: int,
        train: bool,
        inputs: tuple[str, ...] = (),
        on_bad_image: str = "raise",
    ):
        self.dataset, self.transform, self.inputs = dataset, transform, tuple(inputs)
        self.seed, self.train, self.skip = seed, train, on_bad_image == "skip"
        draws = getattr(transform, "draws", True) or getattr(dataset, "draws", True)
        self.draws = train and draws

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, step: Step) -> Batch:
        indices = step.indices if len(step.indices) else np.array([step.start])  # all padding
        n, bad = len(step.indices), []
        seeds = sample_seeds(self.seed, step.epoch, indices) if self.draws else indices
        rows = zip(indices.tolist(), seeds.tolist(), strict=True)
        with random_state_kept() if self.draws else nullcontext():
            items, found = zip(*(self._row(step.epoch, *row, bad) for row in rows), strict=True)
        inputs, target = default_collate(list(items))
        weight = torch.zeros(step.padded)
        weight[:n] = torch.tensor(found[:n], dtype=torch.float32)
        if step.padded > len(items):
            copied = torch.arange(step.padded) % len(items)
            inputs, target = map_tensors(lambda t: t[copied], (inputs, target))
        uniform = n == step.padded and all(found)
        return Batch(tuple(inputs), target, weight, step.total, tuple(bad) if n else (), uniform)

    def _row(self, epoch: int, index: int, seed: int, bad: list) -> tuple[Any, bool]:
        """A row's item, or the next good one's in its place, and whether the row counts."""
        for draw in range(IN_A_ROW):
            try:
                return self._item(index, seed), draw == 0 or self.train
            except BadImage as error:
                if not self.skip or draw == IN_A_ROW - 1:
                    raise
                if draw == 0:
                    bad.append((error.path, error.reason))
            index = (index + 1) % len(self.dataset)
            seed = int(sample_seeds(self.seed, epoch, np.array([index]), draw + 1)[0])

    def _item(self, index: int, seed: int) -> tuple[tuple, Any]:
        if self.draws:
            random.seed(seed)
            np.random.seed(seed >> 32)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 88 us
        inputs, target = self._parts(self.dataset[index])
        return tuple(self.transform(x) if isinstance(x, Image.Image) else x for x in inputs), target

    def _parts(self, sample: Any) -> tuple[tuple, Any]:
        if isinstance(sample, dict):
            names = self.inputs or (next(iter(sample)),)
            if missing := [name for name in names if name not in sample]:
                raise ConfigError(
                    f"the data set has no entry {missing[0]!r}: expected one of "
                    f"{', '.join(sample)}; change task.inputs"
                )
            rest = {name: value for name, value in sample.items() if name not in names}
            target = next(iter(rest.values())) if len(rest) == 1 else rest
            return tuple(sample[name] for name in names), target
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise ConfigError(
                f"the data set gave a {type(sample).__name__}: expected a pair (input, target) or "
                "a dict; change what data._target_ returns"
            )
        inputs, target = sample
        return (inputs if isinstance(inputs, tuple) else (inputs,)), target


def sample_seeds(seed: int, epoch: int, indices: np.ndarray, draw: int = 0) -> np.ndarray:
    """A 64-bit seed for each sample (uint64 array), from (seed, epoch, index, draw) alone."""
    words = np.random.SeedSequence((seed & 0xFFFFFFFF, seed >> 32, epoch, draw))
    return mixed(indices.astype(np.uint64) ^ words.generate_state(1, np.uint64))


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Puts the states of Python's, numpy's and torch's generators back at the end."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


# ---- the loader ----------------------------------------------------------------------------------


def loader(
    samples: Samples,
    steps: Iterable[Step],
    workers: int,
    device: torch.device,
    timeout_s: float = 600,
) -> DataLoader:
    """Batches of the steps, in their order, read ahead by worker processes."""
    return DataLoader(
        samples,
        sampler=steps,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_start_worker,
        pin_memory=device.type == "cuda",
        timeout=timeout_s if workers else 0,
        generator=torch.Generator(),  # else each start draws from the stream dropout uses
    )


def _start_worker(worker: int) -> None:
    # A request to stop reaches the whole process group; it is the training process's to answer,
    # which still needs batches until all ranks have agreed.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_GRACE_S))
    sys.excepthook = lambda *_: None  # a thread that finds it gone has nothing to tell


def explain(error: BaseException) -> str | None:
    """The sentence for an error of the loader that a person can mend; None for others."""
    text = str(error)
    if isinstance(error, BadImage):
        return f"{text}. Set data.on_bad_image=skip, or list all such files: python scripts/scan.py"
    if isinstance(error, ConfigError):
        return text.strip().splitlines()[-1].rpartition("ConfigError: ")[2]
    if not isinstance(error, RuntimeError) or "DataLoader" not in text:
        return None
    return next((told for sign, told in ENDED.items() if re.search(sign, text)), None)
