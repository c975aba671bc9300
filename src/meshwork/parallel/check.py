"""What goes with what: refusals with what would work, asked before any process group exists."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshwork.batch import BatchPlan
from meshwork.config import Config, ConfigError
from meshwork.mesh import SPLIT_BACKWARD, STAGES_PER_RANK, Layout
from meshwork.parallel.batchnorm import couples_samples
from meshwork.parallel.engine import autocast_of
from meshwork.parallel.units import stepped_into, wrappable

if TYPE_CHECKING:  # where nothing is split none of it is imported
    from meshwork.parallel.pipeline import StagePlan
    from meshwork.parallel.tensor import TensorPlan

Inputs = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Split:
    """What is done to the model. units: names of its blocks, in the order of their calls."""

    units: tuple[str, ...] = ()
    stages: "StagePlan | None" = None
    tensor: "TensorPlan | None" = None


def check(
    cfg: Config,
    model: nn.Module,
    task: object,
    layout: Layout,
    device: torch.device,
    inputs: Inputs,
) -> tuple[BatchPlan, Split]:
    """How the batch is dealt and the model split up.

    inputs: gives example inputs of so many rows. Raises ConfigError where the parts of a run do not
    go together.
    """
    p, t = cfg.parallel, cfg.trainer
    for wrong, sentence in _table(cfg, model, layout, device):
        if wrong:
            raise ConfigError(sentence)
    per_sample = getattr(task, "per_sample", True)
    coupled = cfg.mode == "train" and (couples_samples(model) or not per_sample)
    sizes = (t.global_batch_size, layout.data_ranks, t.micro_batch_size, coupled)
    n_stages = layout.pp * STAGES_PER_RANK[p.schedule]
    if layout.pp > 1:
        plan = BatchPlan.pipelined(*sizes, layout.pp, n_stages)
    else:
        plan = BatchPlan.make(*sizes)
    if not per_sample and (layout.pp > 1 or plan.n_micro > 1):
        raise ConfigError(
            f"{type(task).__name__} takes its loss over the whole batch, which parallel.pp="
            f"{layout.pp} and {plan.n_micro} micro-batches a rank would cut: set parallel.pp=1 and "
            "trainer.micro_batch_size=null"
        )
    tensor = stages = None
    if layout.tp > 1:
        from meshwork.parallel.tensor_plan import tensor_plan

        apart = stepped_into(model) if layout.pp > 1 else ()
        tensor = tensor_plan(model, inputs(2), layout.tp, apart)
    if layout.pp > 1:
        from meshwork.parallel.pipeline import stage_plan

        autocast = autocast_of(t.precision, "cpu")
        given = inputs(plan.micro), n_stages, p.schedule, p.stages, autocast
        stages = stage_plan(model, *given, keep=[r.name for r in tensor.regions] if tensor else ())
        _refuse_idle(model, stages, layout.pp)
    recomputes = p.activation_checkpointing != "none" or p.compile
    wraps = stages is None and (layout.shards or recomputes)
    names = wrappable(model, inputs(2)) if wraps else ()
    return plan, Split(names, stages, tensor)


def _refuse_idle(model: nn.Module, stages: "StagePlan", pp: int) -> None:
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    for rank in range(pp):
        held = [stages.parts[i] for i in stages.of_rank(rank, pp)]
        if not any(n in trained for part in held for n, _ in part.named_parameters()):
            names = ", ".join(f"{part.leaves[0]} to {part.leaves[-1]}" for part in held)
            raise ConfigError(
                f"parallel.pp={pp}: pipeline rank {rank} ({names}) would train nothing under "
                "model.freeze: use parallel=fsdp, or a smaller parallel.pp"
            )


def _table(
    cfg: Config, model: nn.Module, layout: Layout, device: torch.device
) -> list[tuple[bool, str]]:
    """(does not go together, what would)."""
    p, t = cfg.parallel, cfg.trainer
    splits = layout.pp > 1 and p.schedule in SPLIT_BACKWARD
    synced = any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    n_stages = layout.pp * STAGES_PER_RANK[p.schedule]
    return [
        (
            t.precision == "fp16" and device.type != "cuda",
            f"trainer.precision=fp16 needs a GPU, found {device.type}: use bf16",
        ),
        (
            t.precision == "fp16" and layout.tp * layout.pp > 1,
            "trainer.precision=fp16 goes with data-parallel layouts only: use bf16",
        ),
        (
            t.precision == "fp64" and device.type == "mps",
            "trainer.precision=fp64 is not known to mps: use fp32, or runtime.device=cpu",
        ),
        (
            splits and layout.shards and p.reshard_after_forward is True,
            f"parallel.reshard_after_forward=true gives wrong gradients under {p.schedule}, whose "
            "backward has two halves: set it to false",
        ),
        (
            splits and p.activation_checkpointing != "none",
            f"parallel.activation_checkpointing={p.activation_checkpointing} does not go with "
            f"{p.schedule}, whose backward has two halves: use parallel.schedule=1F1B",
        ),
        (
            p.compile and layout.tp > 1,
            "parallel.compile=true does not go with parallel.tp: set it to false",
        ),
        (
            p.param_dtype == "bf16" and not layout.shards,
            "parallel.param_dtype=bf16 is for sharded parameters: use parallel=fsdp, or "
            "trainer.precision=bf16",
        ),
        (
            p.stages is not None and layout.pp > 1 and len(p.stages) != n_stages - 1,
            f"parallel.stages names {len(p.stages or ())} modules, but {p.schedule} with "
            f"parallel.pp={layout.pp} has {n_stages} stages: name {n_stages - 1}",
        ),
        (
            synced and device.type == "cpu",
            "SyncBatchNorm does not run on a CPU: use BatchNorm, whose statistics are tied to "
            "trainer.micro_batch_size here",
        ),
    ]
