"""Rows of the start table: what a run is about to do."""

from typing import Any

import torch

from meshwork.batch import BatchPlan
from meshwork.config import Config
from meshwork.distributed import World
from meshwork.mesh import Layout
from meshwork.optim import Horizon


def ranks_row(world: World) -> str:
    """Where the ranks come from, how many, on what."""
    ranks, nodes = world.ranks, len(set(world.hosts)) or 1
    device = world.device.type
    backend = (
        "no process group" if world.control is None else "nccl" if device == "cuda" else "gloo"
    )
    count = (
        f"{ranks.world_size} from {ranks.source}" if ranks.world_size > 1 else f"1, {ranks.source}"
    )
    text = f"{count}; {nodes} node{'s' * (nodes > 1)}, {device}, {backend}"
    more = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if ranks.master is None and more > 1:
        command = f"torchrun --standalone --nproc-per-node={more} train.py"
        text += f"\nthis machine has {more} GPUs: {command}"
    return text


def rows_of_plan(
    cfg: Config,
    layout: Layout,
    plan: BatchPlan,
    split: Any,
    model: Any,
    data: Any,
    horizon: Horizon | None,
) -> list[tuple[str, str]]:
    """Rows of the start table that are known before any rank starts."""
    parameters = list(model.parameters())
    n = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    size = sum(p.numel() * p.element_size() for p in parameters)
    frozen = f", {trained:,} trained" if trained != n else ""
    rows = [
        ("layout", f"{layout}; {n:,} parameters{frozen}, {size / 2**20:.1f} MiB a rank"),
        ("model", _model_row(cfg, model)),
        ("data", _data_row(cfg, plan, data)),
    ]
    if horizon is None:
        return rows
    kind = cfg.optimizer.name or cfg.optimizer._target_.rsplit(".", 1)[-1]
    schedule = cfg.scheduler._target_.rsplit(".", 1)[-1]
    length = f"{horizon.steps:,} steps, {horizon.epoch_steps:,} an epoch"
    rows.append(("batch", _batch_row(cfg, plan)))
    return [*rows, ("schedule", f"{length}; {kind}, lr {cfg.optimizer.lr:g}, {schedule}")]


def _model_row(cfg: Config, model: Any) -> str:
    text = f"{cfg.model.name} ({type(model).__name__}), {cfg.trainer.precision}"
    if cfg.model.checkpoint_path is not None:
        text += f"\nweights from {cfg.model.checkpoint_path}; {getattr(model, 'loaded', '')}"
    return text


def _batch_row(cfg: Config, plan: BatchPlan) -> str:
    text = f"{plan.global_batch} = {plan.ranks} ranks x {plan.n_micro} micro-batches x {plan.micro}"
    extra = plan.padded * plan.ranks - plan.global_batch
    if plan.coupled:
        tied = cfg.trainer.micro_batch_size is None and plan.ranks > 1
        text += f"\nBatchNorm over {plan.micro} samples"
        text += (
            f" (tied to {plan.ranks} ranks): trainer.micro_batch_size={plan.micro} repeats it "
            "elsewhere" * tied
        )
    elif extra:
        text += f"\npadded: {extra} more rows a step are run and masked"
    return text


def _data_row(cfg: Config, plan: BatchPlan, data: Any) -> str:
    sets = {name: getattr(data, name, None) for name in ("train", "val", "test", "predict")}
    text = ", ".join(f"{name} {len(s):,}" for name, s in sets.items() if s is not None)
    text += (
        f"; {len(data.classes)} classes, {data.in_chans} x {data.image_size} x {data.image_size}"
    )
    left = (
        len(data.train) % plan.global_batch if data.train is not None and cfg.data.drop_last else 0
    )
    if left:
        text += (
            f"\n{left} samples that do not fill a batch are left out each epoch, others each time"
        )
    for name, s in sets.items():
        found = {k: v for k, v in getattr(s, "left_out", {}).items() if v}
        if found:
            text += f"\n{name}: left out " + ", ".join(f"{v:,} {k}" for k, v in found.items())
    return text
