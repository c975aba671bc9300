"""BatchNorm sees micro-batches; its running statistics are their mean, committed once a step."""

import pytest
import torch
from jobs import composed, job_of, joined, perturb, steps
from timm.layers import EvoNorm2dB0
from torch import nn

from meshwork.batch import BatchPlan
from meshwork.checkpoint import Position
from meshwork.config import ConfigError
from meshwork.mesh import Layout
from meshwork.overview import rows_of_plan
from meshwork.parallel.batchnorm import couples_samples
from meshwork.trainer import train_batches

NET = (
    "data._target_=toys.noise",
    "data.image_size=8",
    "model=timm",
    "model.name=own",
    "model._target_=toys.NormNet",
    "trainer.precision=fp64",
)


def batch_statistics(job: object, images: torch.Tensor, micro: int) -> tuple:
    """Mean over micro-batches of mean and of unbiased variance of what the layer sees."""
    with torch.no_grad():
        parts = [job.engine.module.conv(x).transpose(0, 1).flatten(1) for x in images.split(micro)]
    return (
        torch.stack([p.mean(1) for p in parts]).mean(0),
        torch.stack([p.var(1) for p in parts]).mean(0),
    )


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
@pytest.mark.parametrize("micro", [24, 6])
def test_running_statistics_are_the_mean_over_micro_batches_once_a_step(
    momentum: float | None, micro: int
) -> None:
    """By the module's momentum; without one, the mean over all steps."""
    value = "null" if momentum is None else momentum
    cfg = composed(
        *NET,
        f"model.args.momentum={value}",
        "trainer.global_batch_size=24",
        f"trainer.micro_batch_size={micro}",
    )
    with joined() as world:
        job = job_of(cfg, world, change=perturb)
        norm = job.engine.module.norm
        mean, var = torch.zeros(6).double(), torch.ones(6).double()
        batches = train_batches(job, Position())
        job.engine.train()
        for step in range(1, 4):
            batch = next(batches).to(world.device, torch.float64)
            seen = batch_statistics(job, batch.inputs[0], micro)
            job.engine.step(batch)
            job.engine.update(job.optimizer)
            m = 1 / step if momentum is None else momentum
            mean, var = (1 - m) * mean + m * seen[0], (1 - m) * var + m * seen[1]
            assert torch.allclose(norm.running_mean, mean, rtol=1e-12)
            assert torch.allclose(norm.running_var, var, rtol=1e-12)
            assert norm.num_batches_tracked == step


def test_frozen_batchnorm_stays_frozen() -> None:
    """Neither its statistics nor its mode move; a batch may then be padded."""
    cfg = composed(
        *NET,
        "model.freeze=[norm]",
        "trainer.global_batch_size=30",
        "trainer.micro_batch_size=8",
        "optimizer=sgd",
    )
    with joined() as world:
        job = job_of(cfg, world)
        assert not job.plan.coupled
        found = steps(job, 3)
        norm = job.engine.module.norm
        assert not norm.training and job.engine.module.training
        assert norm.num_batches_tracked == 0
        assert torch.equal(norm.running_mean, torch.zeros(6).double())
        assert torch.equal(norm.running_var, torch.ones(6).double())
        assert torch.equal(found["weights"]["norm.weight"], torch.ones(6).double())
        job.engine.train(False)
        job.engine.train()
        assert not norm.training


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["trainer.global_batch_size=30", "trainer.micro_batch_size=8"], "24, 32"),
        (["trainer.global_batch_size=30", "parallel.dp_replicate=4"], "28, 32"),
    ],
)
def test_padding_is_refused_with_the_nearest_sizes(given: list[str], named: str) -> None:
    cfg = composed(*NET, *given)
    ranks = max(cfg.parallel.dp_replicate, 1)
    t = cfg.trainer
    with pytest.raises(ConfigError, match=f"trainer.global_batch_size to {named}"):
        BatchPlan.make(t.global_batch_size, ranks, t.micro_batch_size, True)


def test_the_start_table_says_what_batchnorm_is_tied_to() -> None:
    cfg = composed("model=resnet18", "trainer.global_batch_size=64")
    net, layout = nn.BatchNorm2d(3), Layout(dp_replicate=8)

    def batch_row(micro: int | None) -> str:
        cfg.trainer.micro_batch_size = micro
        plan = BatchPlan.make(64, 8, micro, True)
        from meshwork.data import Splits
        from meshwork.optim import Horizon
        from meshwork.parallel.check import Split

        data, horizon = Splits(range(640)), Horizon(10, 10)
        return dict(rows_of_plan(cfg, layout, plan, Split(), net, data, horizon))["batch"]

    assert batch_row(None).splitlines() == [
        "64 = 8 ranks x 1 micro-batches x 8",
        "BatchNorm over 8 samples (tied to 8 ranks): trainer.micro_batch_size=8 repeats it "
        "elsewhere",
    ]
    assert batch_row(4).splitlines()[1] == "BatchNorm over 4 samples"


def test_whatever_keeps_statistics_of_batches_is_tied_to_the_micro_batch() -> None:
    assert couples_samples(nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    assert couples_samples(nn.BatchNorm2d(3, track_running_stats=False))
    assert couples_samples(EvoNorm2dB0(8))
    assert not couples_samples(nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3)))
    frozen = nn.BatchNorm2d(3).requires_grad_(False)
    assert not couples_samples(nn.Sequential(frozen, nn.Linear(3, 3)))
