"""Tensor parallelism on the ranks: each computes its own hidden units and heads.

A region is a module whose forward goes from some linear layers, each rank with its own rows, to a
last one, each rank with its own columns, whose outputs are summed over the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map

SIZES = ("num_heads", "attn_dim", "all_head_dim")  # attributes that count what is split


@dataclass(frozen=True)
class Region:
    """A module that is split. name: in the model. last: the linear layer whose columns are split.

    split: {tensor of the module: (dimension, groups)}, groups of fused rows (3 for qkv) are split
    each by itself. whole: parameters that every rank holds and uses for its part alone.
    """

    name: str
    last: str
    split: dict[str, tuple[int, int]] = field(hash=False)
    whole: tuple[str, ...]
    attention: bool


@dataclass(frozen=True)
class TensorPlan:
    """What is split. tier: 1 MLPs, 2 attention as well. text: for the start table."""

    regions: tuple[Region, ...]
    tier: int
    text: str


def split(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> dict[str, int]:
    """Split the regions that this module holds, in place; their parameters become DTensors.

    Returns {name: groups} of the fused ones: their rows lie rank by rank, [tp, groups, rows].
    """
    fused, held = {}, dict(model.named_modules())
    for region in plan.regions:
        module = held.get(region.name)
        if module is None or not all(hasattr(module, n) for n in (region.last, "forward")):
            continue
        trained = {k: p.requires_grad for k, p in module.named_parameters()}
        for key, (dim, groups) in region.split.items():
            path, _, name = key.rpartition(".")
            owner = module.get_submodule(path)
            if path == region.last or name not in owner._parameters:
                continue
            local = part(
                getattr(owner, name).detach(), dim, groups, mesh.get_local_rank(), mesh.size()
            )
            stored = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            owner.register_parameter(name, nn.Parameter(stored))
            if groups > 1:
                fused[f"{region.name}.{key}" if region.name else key] = groups
        parallelize_module(module.get_submodule(region.last), mesh, RowwiseParallel())
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(trained[key])
        set_sizes(module, region, mesh.size())
        module.forward = _parted(module, module.forward, region, mesh)
    return fused


def _parted(module: nn.Module, forward: Callable, region: Region, mesh: DeviceMesh) -> Callable:
    """The forward of a region on one rank: with its parts of the parameters, plain tensors."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mine = {}
        for key, how in region.split.items():
            tensor = _find(module, key)
            if key.rpartition(".")[0] == region.last:
                continue
            if isinstance(tensor, DTensor):
                mine[key] = tensor.to_local()
            else:  # a buffer, whole on every rank
                mine[key] = part(tensor, *how, mesh.get_local_rank(), mesh.size())
        mine |= {key: _shared(_find(module, key), mesh) for key in region.whole}
        x = narrow(_shared(x, mesh), region, mesh.size())
        with _reparametrize_module(module, mine):
            return forward(x, *args, **kwargs)

    return run


def _find(module: nn.Module, key: str) -> Tensor:
    path, _, name = key.rpartition(".")
    return getattr(module.get_submodule(path), name)


def _shared(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A value that all ranks hold and use for their parts: its gradient is the sum of theirs."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def part(tensor: Tensor, dim: int, groups: int, rank: int, tp: int) -> Tensor:
    """A rank's part of a tensor: of each group of `dim` its share."""
    shape = tensor.shape
    pieces = tensor.unflatten(dim, (groups, tp, shape[dim] // (groups * tp)))
    return pieces.select(dim + 1, rank).flatten(dim, dim + 1).contiguous()


def set_sizes(module: nn.Module, region: Region, tp: int) -> dict[str, int]:
    """Make a module count its own heads alone; returns what it counted before."""
    if not region.attention:
        return {}
    before = {k: v for k, v in vars(module).items() if k in SIZES and type(v) is int}
    vars(module).update({k: v // tp for k, v in before.items()})
    return before


class _Narrow(Tensor):
    """An input whose last dimension seems to be that of a rank's heads: forwards take the width of
    their output from it. To every operation it is the tensor it is."""

    tp = 1

    @property
    def shape(self) -> torch.Size:
        size = self.as_subclass(Tensor).shape
        return torch.Size((*size[:-1], size[-1] // self.tp))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = tree_map(_widened, (args, kwargs or {}))
            return func(*plain[0], **plain[1])


def _widened(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, _Narrow) else value


def narrow(x: Tensor, region: Region, tp: int) -> Tensor:
    return x.as_subclass(type("_Narrow", (_Narrow,), {"tp": tp})) if region.attention else x
