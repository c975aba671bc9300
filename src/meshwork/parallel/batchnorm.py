"""BatchNorm tied to the micro-batch: running statistics that no layout changes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Layers whose training output mixes the samples of a batch, or that keep statistics of
    batches.

    BatchNorm, and what keeps a running variance without being one (timm's EvoNorm B0).
    """
    return [
        m
        for m in model.modules()
        if isinstance(m, _BatchNorm) or getattr(m, "running_var", None) is not None
    ]


def trained_norms(model: nn.Module) -> list[nn.Module]:
    """Those that are trained; where all parameters are frozen, the statistics stay as they are."""
    return [m for m in batch_norms(model) if not is_frozen(m)]


def is_frozen(norm: nn.Module) -> bool:
    """Whether every parameter of a layer is frozen (a layer without any is not)."""
    parameters = list(norm.parameters(recurse=False))
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def couples_samples(model: nn.Module) -> bool:
    """Whether training statistics mix the samples of a micro-batch."""
    return bool(trained_norms(model))


class RunningStatistics:
    """Commits the mean over a step's micro-batches once per optimizer step.

    Each micro-batch updates from the statistics of the step's start, by the module's own momentum;
    the results are averaged. Since the update is linear this is the update by the mean statistics.
    Forward hooks do it, so that any order of micro-batches is right. `skip` marks a dummy
    micro-batch.
    """

    def __init__(self, model: nn.Module):
        self.norms = [m for m in trained_norms(model) if list(m.buffers(recurse=False))]
        self.skip = False  # a dummy micro-batch, or one that is computed again
        self._start: dict[nn.Module, dict[str, Tensor]] = {}
        self._sum: dict[nn.Module, list[Tensor]] = {}
        self._calls: dict[nn.Module, int] = {}
        for norm in self.norms:
            norm.register_forward_pre_hook(self._restore)
            norm.register_forward_hook(self._collect)

    @torch.no_grad()
    def _restore(self, norm: nn.Module, _: tuple) -> None:
        """Each forward gets copies: a pipeline goes back through earlier ones later."""
        if not norm.training:
            return
        if norm not in self._start:
            self._start[norm] = {k: b for k, b in norm._buffers.items() if b is not None}
            self._sum[norm] = [torch.zeros_like(b) for b in _averaged(norm)]
            self._calls[norm] = 0
        norm._buffers.update({k: b.clone() for k, b in self._start[norm].items()})

    @torch.no_grad()
    def _collect(self, norm: nn.Module, *_: object) -> None:
        if norm.training and not self.skip:
            torch._foreach_add_(self._sum[norm], _averaged(norm))
            self._calls[norm] += 1

    @torch.no_grad()
    def commit(self, share: float) -> None:
        """Once per optimizer step: put this rank's part of the mean in place.

        share: micro-batches that counted here, over the mean of the data ranks: with statistics so
        weighted, the plain average over the ranks is the mean over all micro-batches.
        """
        for norm, start in self._start.items():
            kept = (1 - share) * (1 - _momentum(norm))
            n = max(self._calls[norm], 1)
            totals = iter(self._sum[norm])
            for name, buffer in start.items():
                if buffer.is_floating_point():
                    buffer.copy_(kept * buffer + share / n * next(totals))
                else:
                    buffer.copy_(norm._buffers[name])
                norm._buffers[name] = buffer
        self._start, self._sum, self._calls = {}, {}, {}


def _momentum(norm: nn.Module) -> float:
    """What a batch weighs in the running statistics; without a momentum all weigh the same."""
    return 1 / int(norm.num_batches_tracked) if norm.momentum is None else norm.momentum


def _averaged(norm: nn.Module) -> list[Tensor]:
    """Running statistics; the count of batches beside them is a whole number and goes up by
    itself."""
    return [b for b in norm.buffers(recurse=False) if b.is_floating_point()]


@torch.no_grad()
def average_statistics(model: nn.Module, ranks: int, groups: list) -> None:
    """Average running statistics over data ranks: exact, since their update is linear.

    groups: process groups that together span the data ranks.
    """
    for norm in trained_norms(model):
        for buffer in _averaged(norm):
            buffer.div_(ranks)
            for group in groups:
                dist.all_reduce(buffer, group=group)
