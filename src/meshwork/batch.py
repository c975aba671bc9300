"""What a step is made of: `Batch`, the rows a model sees, and `BatchPlan`, who takes which rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwork.config import ConfigError


@dataclass
class Batch:
    """Rows of one rank for one step, or one micro-batch of them.

    inputs: what the model is called with, each [n, ...]. target: a tensor or a nested tuple or dict
    of tensors, each [n, ...]. weight: float32 [n], what a row counts; 0 marks padding. total:
    number of samples of the whole step over all ranks. bad: (path, reason) of images that could not
    be read. uniform: every weight is 1, so that no masking is needed.
    """

    inputs: tuple[Tensor, ...]
    target: Any
    weight: Tensor
    total: int
    bad: tuple[tuple[str, str], ...] = ()
    uniform: bool = False

    def __len__(self) -> int:
        return len(self.weight)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """This batch with a function applied to every tensor."""
        target = map_tensors(function, self.target)
        inputs = tuple(map_tensors(function, self.inputs))
        return Batch(inputs, target, function(self.weight), self.total, self.bad, self.uniform)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """On a device; floating-point inputs, and the weight, in `dtype` where given."""
        if device.type == "cpu" and dtype is None:
            return self
        moved = self.map(lambda t: t.to(device, non_blocking=True))
        if dtype is not None:
            moved.inputs = tuple(
                t.to(dtype) if torch.is_tensor(t) and t.is_floating_point() else t
                for t in moved.inputs
            )
            moved.weight = moved.weight.to(dtype)
        return moved

    def pin_memory(self) -> "Batch":
        return self.map(lambda t: t.pin_memory())

    def split(self, size: int) -> list["Batch"]:
        """Micro-batches of `size` rows."""
        if size == len(self):
            return [self]
        return [self.map(lambda t, a=a: t[a : a + size]) for a in range(0, len(self), size)]

    def head(self, n: int) -> "Batch":
        """The first n rows."""
        return self if n == len(self) else self.map(lambda t: t[:n])


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nested tuple, list or dict with a function applied to every tensor in it."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, dict):
        return {k: map_tensors(function, v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, v) for v in value)
    return value


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is dealt to data ranks and cut into micro-batches.

    global_batch: samples a step. ranks: data ranks. micro: rows a rank holds at once. n_micro:
    micro-batches a rank runs each step. coupled: the model couples samples (BatchNorm), so
    micro-batches are dealt whole and a rank with one less runs a dummy. stages: of a pipeline.
    """

    global_batch: int
    ranks: int
    micro: int
    n_micro: int
    coupled: bool
    stages: int = 1

    @classmethod
    def pipelined(
        cls, global_batch: int, ranks: int, micro: int | None, coupled: bool, pp: int, stages: int
    ) -> "BatchPlan":
        """A plan for `pp` pipeline ranks that hold `stages` stages in all.

        micro: None for the largest that gives 4 x pp micro-batches. Where ranks hold several stages
        their number is a multiple of pp. Raises ConfigError where there are fewer than pp.
        """
        largest = max(1, global_batch // (4 * pp * ranks))
        fitting = (s for s in range(largest, 0, -1) if not coupled or global_batch % s == 0)
        plan = cls.make(global_batch, ranks, micro or next(fitting), coupled)
        if plan.n_micro < pp:
            size = max(1, global_batch // (pp * ranks))
            shrink = micro is not None and size < micro
            more = f"global_batch_size={pp * ranks} or more"
            raise ConfigError(
                f"trainer.global_batch_size={global_batch} over {ranks} data ranks in "
                f"micro-batches of {plan.micro} gives {plan.n_micro} of them for parallel.pp={pp}: "
                f"set trainer.{f'micro_batch_size={size} or less' if shrink else more}"
            )
        unit = pp if stages > pp else 1
        return replace(plan, n_micro=-(-plan.n_micro // unit) * unit, stages=stages)

    @classmethod
    def make(cls, global_batch: int, ranks: int, micro: int | None, coupled: bool) -> "BatchPlan":
        """Raises ConfigError, with the nearest sizes, where the numbers do not go together."""
        if global_batch < ranks:
            raise ConfigError(
                f"trainer.global_batch_size={global_batch} gives {ranks} data ranks less than one "
                f"sample each: set trainer.global_batch_size={ranks} or more, or start at most "
                f"{global_batch} ranks"
            )
        share = -(-global_batch // ranks)
        if not coupled:
            micro = min(micro or share, share)
            return cls(global_batch, ranks, micro, -(-share // micro), False)
        if micro is None and global_batch % ranks:
            near = ", ".join(str(n) for n in nearest_multiples(global_batch, ranks))
            raise ConfigError(
                f"trainer.global_batch_size={global_batch} over {ranks} data ranks would need "
                f"padding, which BatchNorm would count: set trainer.global_batch_size to {near}, "
                "or set trainer.micro_batch_size to a size that divides it"
            )
        micro = micro or share
        if global_batch % micro:
            near = ", ".join(str(n) for n in nearest_multiples(global_batch, micro))
            raise ConfigError(
                f"trainer.global_batch_size={global_batch} is no multiple of "
                f"trainer.micro_batch_size={micro}, and a padded micro-batch would change "
                f"BatchNorm's statistics: set trainer.global_batch_size to {near}"
            )
        if global_batch // micro < ranks:
            raise ConfigError(
                f"trainer.global_batch_size={global_batch} in micro-batches of {micro} gives "
                f"{global_batch // micro} for {ranks} data ranks: set trainer.micro_batch_size to "
                f"{max(1, global_batch // ranks)} or less, or "
                f"trainer.global_batch_size={micro * ranks}"
            )
        return cls(global_batch, ranks, micro, -(-(global_batch // micro) // ranks), True)

    def rows(self, rank: int, size: int | None = None) -> range:
        """Rows that a data rank takes of a step of `size` samples (None: a full one)."""
        size = self.global_batch if size is None else size
        unit = self.micro if self.coupled else 1
        share = (size // unit) * rank // self.ranks, (size // unit) * (rank + 1) // self.ranks
        return range(share[0] * unit, share[1] * unit)

    @property
    def padded(self) -> int:
        """Rows that every rank runs each step, padding included: the shape is constant."""
        return self.micro * self.n_micro

    @property
    def evaluated(self) -> int:
        """Rows that a rank evaluates at once: a pipeline keeps to its shapes."""
        return self.padded if self.stages > 1 else self.micro

    def real_micro(self, rank: int, size: int | None = None) -> int:
        """Micro-batches of a step of `size` samples (null: a full one) that hold any of them on a
        rank.

        The others are dummies: they run, and nothing of them counts.
        """
        return -(-len(self.rows(rank, size)) // self.micro)


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, at least `unit`."""
    return sorted({max(unit, value // unit * unit), -(-value // unit) * unit})
