"""For losses over the whole batch: the rows of all data ranks, with gradients."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor, group: Any) -> Tensor:
        context.group, context.n = group, len(rows)
        found = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, rows.contiguous(), group=group)
        return torch.cat(found)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=context.group)
        first = dist.get_rank(context.group) * context.n
        return total[first : first + context.n], None


def gather(features: Tensor, groups: list) -> Tensor:
    """Rows of all data ranks in the order of the batch.

    features: [n, ...], as many rows on every rank. groups: that together span the data ranks, the
    outer first. The gradient of a row is summed over the ranks that used it.
    """
    for group in reversed(groups):
        features = _Gather.apply(features, group)
    return features
