"""Rows of the start table: what a run is about to do."""

from typing import Any

import torch

from meshwork.batch import BatchPlan
from meshwork.config import Config
from meshwork.distributed import World
from meshwork.mesh import STAGES_PER_RANK, Layout
from meshwork.optim import Horizon, build_optimizer
from meshwork.parallel.check import Split
from meshwork.parallel.fsdp import placement


def ranks_row(world: World) -> str:
    """Where the ranks come from, how many, on what."""
    ranks, nodes, device = world.ranks, len(set(world.hosts)) or 1, world.device.type
    backend = "nccl" if device == "cuda" else "gloo"
    backend = "no process group" if world.control is None else backend
    source = f" from {ranks.source}" if ranks.world_size > 1 else f", {ranks.source}"
    text = f"{ranks.world_size}{source}; {nodes} node{'s' * (nodes > 1)}, {device}, {backend}"
    more = torch.cuda.device_count()
    if ranks.master is None and more > 1:
        command = f"torchrun --standalone --nproc-per-node={more} train.py"
        text += f"\nthis machine has {more} GPUs: {command}"
    return text


def rows_of_plan(
    cfg: Config,
    layout: Layout,
    plan: BatchPlan,
    split: Split,
    model: Any,
    data: Any,
    horizon: Horizon | None,
) -> list[tuple[str, str]]:
    """Rows of the start table that are known before any rank starts."""
    n = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = f", {trained:,} trained" if trained != n else ""
    name = f"{cfg.model.name} ({type(model).__name__}), {cfg.trainer.precision}"
    if cfg.model.checkpoint_path is not None:
        name += f"\nweights from {cfg.model.checkpoint_path}; {getattr(model, 'loaded', '')}"
    rows = [
        ("layout", f"{layout}; {n:,} parameters{frozen}\n{_memory(cfg, layout, split, model)}"),
        *_split_rows(layout, plan, split),
        ("model", name),
        ("data", _data_row(cfg, plan, data)),
    ]
    if horizon is None:
        return rows
    kind = cfg.optimizer.name or cfg.optimizer._target_.rsplit(".", 1)[-1]
    schedule = cfg.scheduler._target_.rsplit(".", 1)[-1]
    length = f"{horizon.steps:,} steps, {horizon.epoch_steps:,} an epoch"
    rows.append(("batch", _batch_row(cfg, plan)))
    return [*rows, ("schedule", f"{length}; {kind}, lr {cfg.optimizer.lr:g}, {schedule}")]


def _memory(cfg: Config, layout: Layout, split: Split, model: Any) -> str:
    """Bytes of the rank that holds most, between steps."""
    regions = split.tensor.regions if split.tensor else ()
    halved = {f"{r.name}.{k}".removeprefix(".") for r in regions for k in r.split}
    ranks = {
        name: split.stages.rank_of(part.number, layout.pp)
        for part in (split.stages.parts if split.stages else ())
        for name, _ in part.named_parameters()
    }
    held, trained = [0] * layout.pp, [0] * layout.pp  # bytes on each pipeline rank
    for name, p in model.named_parameters():
        size = p.numel() * p.element_size() / (layout.tp if name in halved else 1)
        if layout.shards and p.ndim:
            full = max(1, p.shape[placement(p, layout.dp_shard).dim])
            size *= -(-full // layout.dp_shard) / full
        held[ranks.get(name, 0)] += size
        trained[ranks.get(name, 0)] += size * p.requires_grad
    held, trained = max(zip(held, trained, strict=True))
    parts = {"parameters": held, "gradients": trained, "optimizer": _states(cfg) * trained}
    return "a rank: " + ", ".join(f"{k} {v / 2**20:.1f} MiB" for k, v in parts.items())


def _states(cfg: Config) -> int:
    """Tensors that the optimizer keeps of each parameter."""
    p = torch.nn.Parameter(torch.zeros(4, 4))
    p.grad = torch.ones(4, 4)
    optimizer = build_optimizer(cfg.optimizer, [("weight", p)], {"weight": (0.0, 1.0)})
    with torch.random.fork_rng(devices=[]):
        optimizer.step()
    return sum(torch.is_tensor(v) and v.shape == p.shape for v in optimizer.state[p].values())


def _split_rows(layout: Layout, plan: BatchPlan, split: Split) -> list[tuple[str, str]]:
    """What is split by tensor, and each stage of the pipeline."""
    rows = [("tensor", split.tensor.text)] if split.tensor else []
    if split.stages is None:
        return rows
    s, width = split.stages, layout.tp * layout.data_ranks
    lines = []
    for i, part in enumerate(s.parts):
        first = s.rank_of(i, layout.pp) * width
        ranks = f"rank {first}" if width == 1 else f"ranks {first}-{first + width - 1}"
        sent = f", sends {s.crossing[i] / 2**10:,.0f} KiB" if i < len(s.crossing) else ""
        lines.append(
            f"{i} on {ranks}: {part.leaves[0]} to {part.leaves[-1]}; "
            f"{sum(p.numel() for p in part.parameters()):,} parameters, "
            f"{s.work[i]:.0%} of the work{sent}"
        )
    bubble = bubble_of(s.schedule, layout.pp, plan.n_micro)
    lines.append(f"{s.schedule}, {plan.n_micro} micro-batches: {bubble:.0%} of the time idle")
    return [*rows, ("stages", "\n".join(lines))]


def bubble_of(schedule: str, pp: int, n_micro: int) -> float:
    """Share of the time that a rank waits, for stages of equal work and free communication.

    GPipe and 1F1B: (p-1)/(m+p-1); with v stages a rank (p-1)/(v m + p - 1)
    (https://arxiv.org/abs/2104.04473); zero-bubble schedules fill a third of a step's length each
    with the weights' half of the backward (https://arxiv.org/abs/2401.10241).
    """
    idle = pp - 1
    if "ZeroBubble" in schedule:
        idle = 0 if schedule == "ZBVZeroBubble" else idle / 3
    return idle / (STAGES_PER_RANK[schedule] * n_micro + idle)


def _batch_row(cfg: Config, plan: BatchPlan) -> str:
    text = f"{plan.global_batch} = {plan.ranks} ranks x {plan.n_micro} micro-batches x {plan.micro}"
    extra = plan.padded * plan.ranks - plan.global_batch
    if plan.coupled:
        text += f"\nBatchNorm over {plan.micro} samples"
        if cfg.trainer.micro_batch_size is None and plan.ranks > 1:
            typed = f"trainer.micro_batch_size={plan.micro}"
            text += f" (tied to {plan.ranks} ranks): {typed} repeats it elsewhere"
    elif extra:
        text += f"\npadded: {extra} more rows a step are run and masked"
    return text


def _data_row(cfg: Config, plan: BatchPlan, data: Any) -> str:
    names = ("train", "val", "test", "predict")
    sets = {name: s for name in names if (s := getattr(data, name, None)) is not None}
    text = ", ".join(f"{name} {len(s):,}" for name, s in sets.items())
    size = f"{data.in_chans} x {data.image_size} x {data.image_size}"
    text += f"; {len(data.classes)} classes, {size}"
    if data.train is not None and cfg.data.drop_last and (n := len(data.train) % plan.global_batch):
        text += f"\n{n} samples that do not fill a batch are left out each epoch, others each time"
    for name, s in sets.items():
        if found := getattr(s, "left_out", {}):
            text += f"\n{name}: left out " + ", ".join(f"{v:,} {k}" for k, v in found.items())
    return text
