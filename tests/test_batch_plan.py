"""A global batch is dealt to ranks and micro-batches without loss, in constant shapes."""

import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jobs import composed, job_of, joined, perturb
from ranks import train

from meshwork.batch import BatchPlan
from meshwork.checkpoint import Position
from meshwork.config import ConfigError
from meshwork.trainer import advance, train_batches

MLP = (
    "data._target_=toys.noise",
    "data.image_size=8",
    "model=timm",
    "model.name=own",
    "model._target_=toys.Mlp",
)


def plans(n: int, coupled: bool) -> list[BatchPlan]:
    """n random plans that are not refused."""
    draw, found = random.Random(1), []
    while len(found) < n:
        micro = draw.choice([None, draw.randint(1, 40)])
        try:
            found.append(BatchPlan.make(draw.randint(1, 200), draw.randint(1, 9), micro, coupled))
        except ConfigError:
            continue
    return found


@pytest.mark.parametrize("coupled", [False, True])
def test_rows_of_the_ranks_are_a_partition_of_every_step(coupled: bool) -> None:
    for plan in plans(500, coupled):
        sizes = range(0, plan.global_batch + 1, plan.micro if coupled else 1)
        for size in sizes:
            rows = [plan.rows(rank, size) for rank in range(plan.ranks)]
            assert [i for r in rows for i in r] == list(range(size)), (plan, size)
            assert max(len(r) for r in rows) <= plan.padded
            assert max(map(len, rows)) - min(map(len, rows)) <= (plan.micro if coupled else 1)


def test_no_rank_is_without_a_sample_and_no_micro_batch_is_run_for_nothing() -> None:
    for plan in plans(500, False):
        real = [plan.real_micro(rank) for rank in range(plan.ranks)]
        assert min(real) >= 1 and max(real) == plan.n_micro, plan


def test_batchnorm_gets_whole_micro_batches() -> None:
    for plan in plans(500, True):
        assert all(len(plan.rows(r)) % plan.micro == 0 for r in range(plan.ranks)), plan
        total = sum(plan.real_micro(r) for r in range(plan.ranks))
        assert total * plan.micro == plan.global_batch, plan


@pytest.mark.parametrize(
    ("size", "ranks", "micro", "coupled", "named"),
    [
        (2, 4, None, False, [4]),
        (30, 4, None, True, [28, 32]),
        (3, 4, None, True, [4]),
        (30, 1, 8, True, [24, 32]),
        (5, 1, 8, True, [8]),
    ],
)
def test_refusals_name_the_nearest_sizes_that_work(
    size: int, ranks: int, micro: int | None, coupled: bool, named: list[int]
) -> None:
    with pytest.raises(ConfigError) as error:
        BatchPlan.make(size, ranks, micro, coupled)
    advice = str(error.value).partition("set trainer.global_batch_size")[2]
    found = [int(n) for n in re.findall(r"\d+", advice)]
    assert found[: len(named)] == named
    for n in named:
        assert BatchPlan.make(n, ranks, micro, coupled).global_batch == n


def test_fewer_micro_batches_than_ranks_are_refused_with_sizes_that_work() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size to 8 or less") as error:
        BatchPlan.make(32, 4, 16, True)
    assert "trainer.global_batch_size=64" in str(error.value)
    assert BatchPlan.make(32, 4, 8, True).n_micro == 1
    assert BatchPlan.make(64, 4, 16, True).n_micro == 1


@pytest.mark.parametrize(("n", "micro", "model"), [(96, "null", "Mlp"), (100, 8, "NormNet")])
def test_every_step_has_one_shape_and_the_last_trains_on_what_is_left(
    n: int, micro: object, model: str
) -> None:
    """For BatchNorm in whole micro-batches: of 100 samples four are left out."""
    given = ["trainer.global_batch_size=40", "data.drop_last=false", f"data.num_samples={n}"]
    given += [f"trainer.micro_batch_size={micro}", f"model._target_=toys.{model}"]
    with joined() as world:
        job = job_of(composed(*MLP, *given), world)
        position, sizes, seen = Position(), [], 0
        batches = train_batches(job, position)
        for _ in range(6):
            batch = next(batches)
            assert batch.inputs[0].shape == (40, 1, 8, 8)
            assert int(batch.weight.sum()) == batch.total
            sizes.append(batch.total)
            seen += batch.total
            advance(position, batch.total, job)
            assert (position.samples, position.step) == (seen, len(sizes))
    assert sizes == [40, 40, 16, 40, 40, 16]
    assert (position.epoch, position.offset) == (2, 0)


def gradients_by_hand(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("micro", ["null", 8])
def test_a_short_last_step_is_the_gradient_of_the_small_batch_alone(micro: object) -> None:
    """Accumulation too: two micro-batches of what is left, not five."""
    cfg = composed(
        *MLP,
        "trainer.global_batch_size=40",
        f"trainer.micro_batch_size={micro}",
        "data.drop_last=false",
        "trainer.precision=fp64",
    )
    with joined() as world:
        job = job_of(cfg, world, change=perturb)
        batches = train_batches(job, Position(offset=80))
        batch = next(batches).to(world.device, torch.float64)
        assert batch.total == 16
        wanted = gradients_by_hand(job.engine.module, batch.inputs[0][:16], batch.target[:16])
        job.engine.step(batch)
        for name, parameter in job.engine.named_parameters():
            assert torch.allclose(parameter.grad, wanted[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["trainer.global_batch_size=10"], "padded: 2 more rows a step are run and masked"),
        (
            ["trainer.global_batch_size=2"],
            "4 data ranks less than one sample each: set trainer.glo",
        ),
        (
            ["trainer.global_batch_size=8", "data.num_samples=3"],
            "set it to 3 or less, or data.drop",
        ),
        (["data.num_samples=0"], "data.num_samples=0: expected at least 1"),
        (["data.num_samples=100"], "36 samples that do not fill a batch are left out each epoch"),
    ],
)
def test_what_a_batch_does_to_the_data_is_said_before_four_ranks_start(
    given: list[str], said: str, tmp_path: Path
) -> None:
    ended = train(1, *given, "dry_run=4", "model.args={patch_size: 8, depth: 1}", cwd=tmp_path)
    text = " ".join((ended.all_out + ended.all_err).split())
    assert said in text
    assert ended.codes == ([0] if "samples that" in said or "padded" in said else [2])
    assert list(tmp_path.iterdir()) == []


class InfiniteOnPadding:
    """Cross-entropy, infinite for rows that are padding, as a part too."""

    def loss(self, output: torch.Tensor, batch: object) -> tuple:
        value = F.cross_entropy(output, batch.target, reduction="none")
        value = torch.where(batch.weight > 0, value, torch.inf)
        return value, {"part": value}


def test_what_a_padded_row_gives_does_not_matter_not_even_infinity() -> None:
    cfg = composed(*MLP, "trainer.global_batch_size=30", "trainer.micro_batch_size=8")
    with joined() as world:
        job = job_of(cfg, world, change=perturb)
        batch = next(train_batches(job, Position()))
        assert len(batch) == 32 and batch.total == 30
        wanted = gradients_by_hand(job.engine.module, batch.inputs[0][:30], batch.target[:30])
        job.engine.task = InfiniteOnPadding()
        shares = job.engine.step(batch)
        assert shares["loss"].isfinite() and shares["part"] == shares["loss"]
        for name, parameter in job.engine.named_parameters():
            assert torch.allclose(parameter.grad, wanted[name], rtol=1e-5, atol=1e-7)
