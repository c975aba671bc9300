"""BatchNorm tied to the micro-batch: running statistics that no layout changes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def trained_norms(model: nn.Module) -> list[_BatchNorm]:
    """BatchNorm layers that are trained; those whose parameters are all frozen stay as they are."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and not is_frozen(m)]


def is_frozen(norm: nn.Module) -> bool:
    """Whether every parameter of a layer is frozen (a layer without any is not)."""
    parameters = list(norm.parameters(recurse=False))
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def couples_samples(model: nn.Module) -> bool:
    """Whether training statistics mix the samples of a micro-batch."""
    return bool(trained_norms(model))


class RunningStatistics:
    """Commits the mean over a step's micro-batches once per optimizer step.

    Each micro-batch updates from the statistics of the step's start, by the module's own momentum; the
    results are averaged. Since the update is linear this is the update by the mean statistics. Forward
    hooks do it, so that any order of micro-batches is right. `skip` marks a dummy micro-batch.
    """

    def __init__(self, model: nn.Module):
        self.norms = [m for m in trained_norms(model) if m.running_mean is not None]
        self.skip = False
        self._start: dict[nn.Module, list[torch.Tensor]] = {}
        self._sum: dict[nn.Module, list[torch.Tensor]] = {}
        self._count: dict[nn.Module, int] = {}
        for norm in self.norms:
            norm.register_forward_pre_hook(self._restore)
            norm.register_forward_hook(self._collect)

    @torch.no_grad()
    def _restore(self, norm: nn.Module, _: tuple) -> None:
        if not norm.training:
            return
        if norm not in self._start:
            self._start[norm] = [b.clone() for b in norm.buffers(recurse=False)]
        for buffer, start in zip(norm.buffers(recurse=False), self._start[norm], strict=True):
            buffer.copy_(start)

    @torch.no_grad()
    def _collect(self, norm: nn.Module, *_: object) -> None:
        if not norm.training or self.skip:
            return
        moved = [norm.running_mean, norm.running_var]
        if norm not in self._sum:
            self._sum[norm] = [b.clone() for b in moved]
        else:
            torch._foreach_add_(self._sum[norm], moved)
        self._count[norm] = self._count.get(norm, 0) + 1

    @torch.no_grad()
    def commit(self) -> None:
        """Once per optimizer step: put the mean in place."""
        for norm, start in self._start.items():
            for buffer, value in zip(norm.buffers(recurse=False), start, strict=True):
                buffer.copy_(value)
            if count := self._count.get(norm):
                torch._foreach_div_(self._sum[norm], count)
                norm.running_mean.copy_(self._sum[norm][0])
                norm.running_var.copy_(self._sum[norm][1])
                norm.num_batches_tracked.add_(1)
        self._start, self._sum, self._count = {}, {}, {}


@torch.no_grad()
def average_statistics(model: nn.Module, share: float, group: dist.ProcessGroup | None) -> None:
    """Average running statistics over data ranks; share: this rank's part of the micro-batches.

    Exact, since the update of running statistics is linear.
    """
    for norm in trained_norms(model):
        for buffer in (norm.running_mean, norm.running_var):
            if buffer is not None:
                buffer.mul_(share)
                dist.all_reduce(buffer, group=group)
