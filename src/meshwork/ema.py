"""An exponential moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwork.parallel.engine import Engine
from meshwork.parallel.fsdp import local


class Ema:
    """The average of an engine's parameters: w <- d w + (1 - d) parameter after each update.

    d is `decay`, and less in the beginning: (1 + step) / (10 + step). weights: {name: tensor} under
    the bare model's names; what is split is split alike. Buffers are not averaged.
    """

    def __init__(self, engine: Engine, decay: float):
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        self.reset(engine)

    @torch.no_grad()
    def reset(self, engine: Engine) -> None:
        """Begin again at the parameters of now."""
        self.weights = {n: p.detach().clone() for n, p in engine.named_parameters()}
        self.own = [local(w) for w in self.weights.values()]
        self.parameters = [p for _, p in engine.named_parameters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After the update that made `step` finished ones."""
        decay = min(self.decay, (1 + step) / (10 + step))
        now = [local(p.detach()) for p in self.parameters]
        torch._foreach_lerp_(self.own, now, 1 - decay)

    @contextmanager
    def swapped(self, engine: Engine) -> Iterator[None]:
        """The engine computes with the averages inside, and has its own weights back afterwards,
        whatever happens there."""
        self._swap()
        engine.forget_gathered()
        try:
            yield
        finally:
            self._swap()
            engine.forget_gathered()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self.own, self.parameters, strict=True):
            value = local(parameter.detach())
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)
