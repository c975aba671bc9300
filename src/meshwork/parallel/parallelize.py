"""From a bare model to an Engine: cut, split, recompute, compile, shard or replicate; in this
order."""

import os
from functools import partial

import torch
import torch._functorch.config
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwork.batch import BatchPlan
from meshwork.config import Config
from meshwork.distributed import World
from meshwork.mesh import SPLIT_BACKWARD, Layout
from meshwork.parallel.check import Split
from meshwork.parallel.engine import Engine, tensors_of
from meshwork.parallel.fsdp import shard
from meshwork.parallel.gather import gather
from meshwork.parallel.units import compile_unit, is_composite, recompute


def parallelize(
    model: nn.Module,
    task: object,
    cfg: Config,
    layout: Layout,
    plan: BatchPlan,
    split_up: Split,
    world: World,
) -> Engine:
    """Put the model on its ranks, and seed what is drawn during training.

    split_up: what `check` found out. Dropout differs between data ranks, is equal on ranks that
    hold the same activation, and repeats for the same seed and layout.
    """
    _set_torch(cfg)
    rank, stages = world.ranks.rank, split_up.stages
    shapes = {k: v.shape for k, v in tensors_of([model]).items()}
    only_ddp = layout.data_ranks == world.ranks.world_size and not layout.shards
    mesh = None if only_ddp else layout.mesh(world.device.type)
    if stages is None:
        kind, parts, units = Engine, [model], [split_up.units]
    else:
        from meshwork.parallel.pipeline_engine import PipelineEngine

        numbers = stages.of_rank(layout.pp_rank(rank), layout.pp)
        kind, parts = PipelineEngine, [stages.parts[i] for i in numbers]
        units = [part.units for part in parts]
    fused: dict[str, int] = {}
    for part, names in zip(parts, units, strict=True):
        part.to(world.device)
        if split_up.tensor is not None:
            from meshwork.parallel.tensor import split

            fused |= split(part, split_up.tensor, mesh["tp"])
        for block in (part.get_submodule(n) for n in names):
            if cfg.parallel.compile and is_composite(block):
                compile_unit(block)
            if cfg.parallel.activation_checkpointing == "full" and is_composite(block):
                recompute(block, lambda: engine.recomputing())
        if layout.shards:
            shard(part, names, mesh, cfg.parallel)
    wrapped = parts[0]
    if only_ddp and layout.dp_replicate > 1:
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            forward_sync_buffers=False,
            gradient_as_bucket_view=True,
            find_unused_parameters=cfg.parallel.find_unused_parameters,
        )
    engine = kind(parts, wrapped, task, cfg, layout, plan, world, shapes, fused, mesh)
    if stages is not None:
        engine.connect(stages, layout)
        engine.module.pretrained_cfg = getattr(model, "pretrained_cfg", None)
    if not getattr(task, "per_sample", True):
        task.gather = partial(gather, groups=engine.data_groups)
    for helper in getattr(task, "helpers", {}).values():
        helper.to(world.device, engine.dtype).eval().requires_grad_(False)
    stream = engine.data_rank + layout.data_ranks * layout.pp_rank(rank)
    torch.manual_seed((cfg.seed * 1_000_003 + 1 + stream) % 2**63)
    return engine


def _set_torch(cfg: Config) -> None:
    """Settings of the process; each run sets all of them, since a sweep may run several in one."""
    t = cfg.trainer
    torch.set_float32_matmul_precision(t.matmul_precision)
    torch.autograd.set_detect_anomaly(t.detect_anomaly)
    # Two backward passes over one graph: its buffers may not be given away in the first.
    torch._functorch.config.donated_buffer = cfg.parallel.schedule not in SPLIT_BACKWARD
    if t.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it
    torch.use_deterministic_algorithms(t.deterministic)
