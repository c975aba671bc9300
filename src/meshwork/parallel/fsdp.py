"""Sharded data parallelism: FSDP2 over the units of a model, gradient norms over every layout."""

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwork.batch import map_tensors
from meshwork.config import Parallel
from meshwork.mesh import SPLIT_BACKWARD
from meshwork.parallel.batchnorm import batch_norms

SMALL = 0.01  # units with less than this share of the parameters stay with the root's group


def shard(root: nn.Module, names: Collection[str], mesh: DeviceMesh, cfg: Parallel) -> None:
    """fully_shard the named units, then the root with what is left, over the data axes of a mesh.

    mesh: the whole mesh of the job. Split-backward schedules keep the parameters after the forward
    (they would be missing in the second half of the backward).
    """
    axes = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    data = mesh[axes]
    size = mesh["dp_shard"].size()
    low = torch.bfloat16 if cfg.param_dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    given = {
        "mesh": data,
        "reshard_after_forward": _reshard(cfg),
        "shard_placement_fn": lambda p: placement(p, size),
    }
    if low is not None:  # BatchNorm knows no bf16 weights beside fp32 statistics
        whole = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=low)
        for norm in batch_norms(root):
            fully_shard(norm, **given, mp_policy=whole)
    modules = dict(root.named_modules())
    total = sum(p.numel() for p in root.parameters())
    for name in names:
        if sum(p.numel() for p in modules[name].parameters()) >= SMALL * total:
            modules[name].register_forward_hook(_no_view)
            fully_shard(modules[name], **given, mp_policy=policy)
    root.register_forward_hook(_no_view)
    fully_shard(root, **given, mp_policy=replace(policy, output_dtype=low and torch.float32))


def _no_view(_: nn.Module, __: tuple, output: object) -> object:
    """An in-place operation on a view that a block returns would take FSDP's hook off it."""
    return map_tensors(lambda t: t.clone() if t._is_view() else t, output)


def _reshard(cfg: Parallel) -> bool:
    typed = cfg.reshard_after_forward
    return cfg.schedule not in SPLIT_BACKWARD if typed is None else typed


def placement(parameter: Tensor, size: int) -> Shard:
    """The first dimension that divides; else the first of all, which may be uneven."""
    dims = (d for d, n in enumerate(parameter.shape) if n % size == 0)
    return Shard(next(dims, 0))


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_over(tensor: Tensor, axis: str) -> int | None:
    """The dimension that a mesh axis splits, if it does."""
    if not isinstance(tensor, DTensor) or axis not in tensor.device_mesh.mesh_dim_names:
        return None
    found = tensor.placements[tensor.device_mesh.mesh_dim_names.index(axis)]
    return getattr(found, "dim", None)  # a strided shard is no Shard


def total_norm(gradients: list[Tensor], mesh: DeviceMesh, device: torch.device) -> Tensor:
    """Norm of the whole model's gradient, float64, the same on all ranks.

    Each element counts once: what tp splits is summed over tp, all over dp_shard and pp.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=device)
    for i, split in enumerate((True, False)):
        mine = [local(g) for g in gradients if (split_over(g, "tp") is not None) == split]
        mine = [g for g in mine if g.numel()]
        if mine:
            squares[i] = torch.stack(torch._foreach_norm(mine)).double().square().sum()
    if mesh["tp"].size() > 1:
        dist.all_reduce(squares[:1], group=mesh.get_group("tp"))
    total = squares.sum()
    for axis in ("dp_shard", "pp"):
        if mesh[axis].size() > 1:
            dist.all_reduce(total, group=mesh.get_group(axis))
    return total.sqrt()


def whole(tensor: Tensor, groups: int = 1) -> Tensor:
    """A parameter, gradient or moment in full, in the order of the bare model; a collective.

    groups: of fused rows (3 for qkv) whose parts lie rank by rank.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    full = tensor.detach().full_tensor()
    if groups == 1:
        return full
    tp = tensor.device_mesh["tp"].size()
    return full.unflatten(0, (tp, groups, -1)).transpose(0, 1).flatten(0, 2)


def put(target: Tensor, full: Tensor, groups: int = 1) -> None:
    """The reverse of `whole`: this rank's part of a full tensor into target, in place."""
    with torch.no_grad():
        if not isinstance(target, DTensor):
            target.copy_(full)
            return
        if groups > 1:
            tp = target.device_mesh["tp"].size()
            full = full.unflatten(0, (groups, tp, -1)).transpose(0, 1).flatten(0, 2)
        part = full
        for axis in ("tp", "dp_shard"):  # in the order in which they were split
            if (dim := split_over(target, axis)) is not None:
                mesh = target.device_mesh[axis]
                chunks = part.chunk(mesh.size(), dim)
                rank = mesh.get_local_rank()
                part = chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0)
        target.to_local().copy_(part)
