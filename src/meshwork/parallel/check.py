"""What goes with what: refusals with what would work, asked before any process group exists."""

import torch
from torch import nn

from meshwork.batch import BatchPlan
from meshwork.config import Config, ConfigError
from meshwork.mesh import Layout
from meshwork.parallel.batchnorm import couples_samples


def check(cfg: Config, model: nn.Module, layout: Layout, device: torch.device) -> BatchPlan:
    """How the batch is dealt; raises ConfigError where the parts of a run do not go together."""
    for axis in ("dp_shard", "tp", "pp"):
        if getattr(layout, axis) > 1:
            raise ConfigError(
                f"parallel.{axis}={getattr(layout, axis)}: this version trains data-parallel only; "
                f"set parallel.{axis}=1 (parallel=ddp)"
            )
    t = cfg.trainer
    if t.precision == "fp16" and device.type != "cuda":
        raise ConfigError(f"trainer.precision=fp16 needs a GPU, found {device.type}: use bf16")
    if t.precision == "fp64" and device.type == "mps":
        raise ConfigError(
            "trainer.precision=fp64 is not known to mps: use fp32, or runtime.device=cpu"
        )
    coupled = cfg.mode == "train" and couples_samples(model)
    return BatchPlan.make(t.global_batch_size, layout.data_ranks, t.micro_batch_size, coupled)
