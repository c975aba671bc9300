"""What the loop sees of a model: gradients, dropout, precision, and what goes wrong in a step."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toys
from jobs import composed, job_of, joined, perturb, steps
from ranks import run_ranks, train
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from meshwork.batch import BatchPlan
from meshwork.checkpoint import Position
from meshwork.memory import out_of_memory
from meshwork.parallel.engine import common_prefixes, masked_sum
from meshwork.trainer import train_batches

OWN = ("data._target_=toys.noise", "data.image_size=8", "model=timm", "model.name=own")
MLP = (*OWN, "model._target_=toys.Mlp", "trainer.global_batch_size=24")


def on_two_ranks(rank: int) -> dict:
    """What is asked of two ranks, in one start of them."""
    with joined(dict(os.environ)) as world:
        return {
            "reductions": reductions(world),
            "masks": [masks(world, seed) for seed in (0, 0, 1)],
            "unused": sentence_on_unused(world),
            "allowed": steps(unused(world, "parallel.find_unused_parameters=true"), 3)["losses"],
            "frozen": steps(unused(world, "model.freeze=[aux]"), 3)["losses"],
            "norm": norm_where_one_rank_overflows(world),
        }


def reductions(world: object) -> list[int]:
    """Gradient reductions of each of three steps of three micro-batches."""
    job = job_of(composed(*MLP, "trainer.micro_batch_size=4"), world)
    calls = []

    def counted(group: object, bucket: dist.GradBucket):
        calls.append(bucket.index())
        return allreduce_hook(None, bucket)

    job.engine.wrapped.register_comm_hook(None, counted)
    assert job.plan.n_micro == 3
    counts, batches = [], train_batches(job, Position())
    for _ in range(3):
        job.engine.step(next(batches))
        job.engine.update(job.optimizer)
        counts.append(len(calls))
    return [b - a for a, b in zip([0, *counts], counts, strict=False)]


def masks(world: object, seed: int) -> list[float]:
    """A trace of dropout's masks: outputs of the same image in every row, all weights one."""
    model = "model._target_=toys.Dropped"
    job = job_of(composed(*OWN, model, "trainer.global_batch_size=4", f"seed={seed}"), world)
    with torch.no_grad():
        for p in job.engine.module.parameters():
            p.fill_(1.0)
        return [float(x) for _ in range(8) for x in job.engine.module(torch.ones(2, 1, 8, 8))[:, 0]]


def unused(world: object, *more: str) -> object:
    return job_of(composed(*MLP, "model._target_=toys.Unused", *more), world)


def sentence_on_unused(world: object) -> str:
    job = unused(world)
    with pytest.raises(Exception) as error:
        job.engine.step(next(train_batches(job, Position())))
    return f"{type(error.value).__name__}: {error.value}"


def norm_where_one_rank_overflows(world: object) -> list[float]:
    """The norm of a step in which rank 1's image is infinite."""
    job = job_of(composed(*MLP, "trainer.clip_grad_norm=1"), world)
    batch = next(train_batches(job, Position()))
    if world.ranks.rank == 1:
        batch.inputs[0][0, 0, 0, 0] = torch.nan
    job.engine.step(batch)
    norm = float(job.engine.clip_grad_norm(1.0))
    return [norm, *(float(p.grad.abs().max()) for p in job.engine.module.parameters())]


@pytest.fixture(scope="module")
def two() -> list[dict]:
    return run_ranks(2, on_two_ranks)


def test_gradients_are_reduced_once_a_step_whatever_the_accumulation(two: list[dict]) -> None:
    assert two[0]["reductions"] == two[1]["reductions"] == [1, 1, 1]


def test_dropout_differs_between_data_ranks_and_repeats_for_a_seed(two: list[dict]) -> None:
    (a0, b0, c0), (a1, b1, c1) = two[0]["masks"], two[1]["masks"]
    assert a0 == b0 and a1 == b1
    assert len(set(map(tuple, (a0, a1, c0, c1)))) == 4
    assert len(set(a0)) > 4  # masks differ between samples too


def test_an_unused_parameter_is_named_with_what_to_do(two: list[dict]) -> None:
    for found in two:
        assert found["unused"].startswith("ConfigError: 4 parameters got no gradient (aux.0.weight")
        assert "model.freeze=[aux]" in found["unused"]
        assert "parallel.find_unused_parameters=true" in found["unused"]


def test_both_ways_out_of_an_unused_parameter_work(two: list[dict]) -> None:
    with joined() as world:
        alone = steps(unused(world), 3)["losses"]
    for found in two:
        assert found["allowed"] == pytest.approx(alone, rel=1e-6)
        assert found["frozen"] == pytest.approx(alone, rel=1e-6)


def test_a_gradient_that_is_not_finite_is_so_on_all_ranks(two: list[dict]) -> None:
    for found in two:
        assert all(x != x for x in found["norm"])


def test_the_prefixes_to_freeze_stand_for_the_unused_parameters_alone() -> None:
    names = ["stem.weight", "head.aux.0.weight", "head.aux.0.bias", "head.fc.weight", "ab", "a.b"]
    assert common_prefixes(names[1:3], names) == ["head.aux"]
    assert common_prefixes(names[2:3], names) == ["head.aux.0.bias"]
    assert common_prefixes(names[1:4], names) == ["head"]
    assert common_prefixes(["ab"], names) == ["ab"]


def test_a_weighted_sum_ignores_what_does_not_count() -> None:
    values = torch.tensor([1.0, torch.inf, torch.nan, 2.0])
    weight = torch.tensor([1.0, 0.0, 0.0, 3.0])
    assert masked_sum(values, weight, False) == 7
    assert masked_sum(values[:1], weight[:1], True) == 1


@pytest.mark.parametrize("largest", [0.1, 1e6])
def test_clipping_scales_the_whole_gradient_to_the_norm(largest: float) -> None:
    with joined() as world:
        job = job_of(composed(*MLP), world, change=perturb)
        job.engine.step(next(train_batches(job, Position())))
        before = [p.grad.clone() for p in job.engine.module.parameters()]
        wanted = torch.cat([g.flatten() for g in before]).norm()
        assert job.engine.clip_grad_norm(largest) == pytest.approx(float(wanted), rel=1e-6)
        factor = min(1.0, largest / float(wanted))
        for p, g in zip(job.engine.module.parameters(), before, strict=True):
            assert torch.allclose(p.grad, g * factor, rtol=1e-4)


def test_bf16_leaves_weights_gradients_and_loss_in_fp32() -> None:
    with joined() as world:
        job = job_of(composed(*MLP, "trainer.precision=bf16"), world)
        batch = next(train_batches(job, Position()))
        shares = job.engine.step(batch)
        assert shares["loss"].dtype == torch.float32
        for p in job.engine.module.parameters():
            assert p.dtype == p.grad.dtype == torch.float32
        assert job.engine.predict(batch).dtype == torch.bfloat16


@pytest.mark.parametrize("seed", [0, 2**40, 2**63 - 1])
def test_any_seed_of_64_bits_trains(seed: int) -> None:
    with joined() as world:
        assert len(steps(job_of(composed(*MLP, f"seed={seed}"), world), 2)["losses"]) == 2


def test_settings_of_torch_are_those_of_the_run() -> None:
    """And of the next run in the same process again."""
    given = ["trainer.deterministic=true", "trainer.detect_anomaly=true"]
    with joined() as world:
        job_of(composed(*MLP, *given, "trainer.matmul_precision=high"), world)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_anomaly_enabled()
        assert torch.get_float32_matmul_precision() == "high"
        job_of(composed(*MLP), world)
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.is_anomaly_enabled()
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("error", "where"), [("cpu", "the host"), ("gpu", "the GPU")])
def test_out_of_memory_ends_with_the_next_smaller_micro_batch(
    error: str, where: str, tmp_path: Path
) -> None:
    given = [
        *OWN,
        "model._target_=toys.NoMemory",
        "trainer.global_batch_size=15",
        f"model.args.error={error}",
        "logger=none",
        "data.workers=0",
    ]
    ended = train(1, *given, cwd=tmp_path, before=toys.allow)
    assert ended.codes == [2]
    assert ended.all_err.strip().splitlines() == [
        f"error: out of memory on {where} with micro-batches of 15: type "
        "trainer.micro_batch_size=8 (the results stay the same; trainer.global_batch_size stays 15)"
    ]


def test_out_of_memory_keeps_to_sizes_that_batchnorm_can_take() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    said = str(out_of_memory(error, BatchPlan.make(48, 1, 12, True)))
    assert "trainer.micro_batch_size=6" in said and "BatchNorm then sees fewer" in said
    assert "trainer.micro_batch_size=3" in str(out_of_memory(error, BatchPlan.make(9, 1, 9, True)))
    assert "one sample at a time" in str(out_of_memory(error, BatchPlan.make(8, 1, 1, False)))
    assert out_of_memory(RuntimeError("shapes differ"), BatchPlan.make(8, 1, 1, False)) is None
