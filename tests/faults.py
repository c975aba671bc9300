"""Faults planted from outside: data sets, tasks and hooks that fail on one rank at one moment."""

import os
import signal
import time

import torch

from meshwork.data import Splits, synthetic
from meshwork.tasks import Classification

RANK = int(os.environ.get("RANK", 0))


def allow(rank: int) -> None:
    """Let configs of this process name what stands here."""
    from meshwork import build

    build.ALLOWED += ("faults",)


class Failing(Classification):
    """A task whose loss raises on one rank at one step, or kills the process there."""

    def __init__(self, at_step: int = 3, on_rank: int = 1, how: str = "raise", **given):
        super().__init__(**given)
        self.at_step, self.on_rank, self.how, self.step = at_step, on_rank, how, 0

    def loss(self, output, batch):
        self.step += 1
        if self.step == self.at_step and int(os.environ.get("RANK", 0)) == self.on_rank:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "exit":
                raise SystemExit(3)
            if self.how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            raise ValueError("planted on purpose")
        return super().loss(output, batch)


def slow_synthetic(image_size: int, seed: int, wait_s: float = 0.05, **given) -> Splits:
    """Synthetic data of which every sample takes its time."""
    splits = synthetic(image_size=image_size, seed=seed, **given)

    class Slow:
        draws = False

        def __len__(self) -> int:
            return len(splits.train)

        def __getitem__(self, index: int):
            time.sleep(wait_s)
            return splits.train[index]

    return Splits(Slow(), splits.val, None, None, splits.classes, splits.in_chans, image_size)


class Slow(Classification):
    """A task whose loss takes its time, in training or in evaluation."""

    def __init__(self, wait_s=0.2, training=True, on_rank=None, quick=0, **given):
        super().__init__(**given)
        self.wait_s, self.training, self.quick = wait_s, training, quick
        self.mine = on_rank is None or int(os.environ.get("RANK", 0)) == on_rank

    def loss(self, output, batch):
        trains = torch.is_grad_enabled() and output.requires_grad
        self.quick -= 1  # so many calls take no time
        if self.mine and trains == self.training and self.quick < 0:
            end = time.monotonic() + self.wait_s
            while (left := end - time.monotonic()) > 0:  # a signal's handler may end a sleep
                time.sleep(min(left, 0.5))
        return super().loss(output, batch)
