"""Evaluation is exact: each sample once, the same numbers on 1, 2, 3 and 4 ranks."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jobs import composed, job_of, joined, perturb, steps
from PIL import Image
from ranks import run_ranks

from meshwork import build
from meshwork.evaluate import evaluate, summarize
from meshwork.trainer import evaluation_set

OWN = ("model=timm", "model.name=own", "data._target_=toys.noise", "data.image_size=8")
NORM = (*OWN, "model._target_=toys.NormNet", "trainer.global_batch_size=32")
VIT = ("model.args={patch_size: 8, depth: 1}", "trainer.micro_batch_size=4")
CASES = {
    "21 of 4 rows": (*VIT, "data.val_samples=21", "trainer.global_batch_size=16"),
    "a prime, workers": (*VIT, "data.val_samples=53", "data.workers=2"),
    "fewer than ranks": (*VIT, "data.val_samples=3"),
    "one": (*OWN, "model._target_=toys.Mlp", "data.val_samples=1", "trainer.precision=fp64"),
    "slices of the ranks": (*OWN, "model._target_=toys.Mlp", "data.val_samples=100"),
    "batchnorm": (*NORM, "data.val_samples=37", "trainer.micro_batch_size=8"),
}


def run(rank: int, images: str) -> dict:
    """Metrics, totals and worst losses of every case, on these ranks."""
    n, found = int(os.environ["WORLD_SIZE"]), {}
    with joined(dict(os.environ) if n > 1 else None) as world:
        for name, given in CASES.items():
            job = job_of(composed(*given), world, change=perturb)
            if name == "batchnorm":  # its statistics are those of 20 steps, on each rank its own
                steps(job, 20, sync=False)
            found[name] = evaluated(job)
        folder = ("mode=validate", "data=imagefolder", f"data.root={images}", "data.image_size=32")
        cfg = composed(*folder, *VIT, "data.on_bad_image=skip")
        found["bad image"] = evaluated(job_of(cfg, world))
    return found


def evaluated(job: object) -> dict:
    result = evaluate(job.engine, evaluation_set(job, job.data.val), job.world, keep_worst=True)
    totals = {k: v.numpy() for k, v in result.totals.items()}
    worst = [(w[0], w[3], w[4]) for w in result.worst]
    return {"metrics": result.metrics, "totals": totals, "worst": worst, "bad": len(result.bad)}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, seven images to validate on, one of them cut short."""
    root = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for i in range(18):
        folder = root / ("train" if i < 11 else "val") / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(folder / f"{i}.png")
    broken = root / "val" / "dog" / "14.png"
    broken.write_bytes(broken.read_bytes()[:700])
    return root


@pytest.fixture(scope="module")
def alone(images: Path) -> dict:
    return run_ranks(1, run, str(images))[0]


def by_hand(given: tuple[str, ...]) -> dict[str, float]:
    """Loss and hits of one forward over all of the validation set, in fp64."""
    with joined() as world:
        job = job_of(composed(*given, "trainer.precision=fp64"), world, change=perturb)
        data, cfg = job.data, job.cfg
        samples = build.build_samples(cfg, data.val, data, job.engine.module, None, False)
        pairs = [samples._item(i, 0) for i in range(len(samples))]
        images = torch.stack([x[0] for x, _ in pairs]).double()
        labels = torch.tensor([y for _, y in pairs])
        job.engine.train(False)
        with torch.no_grad():
            scores = job.engine.module(images)
        places = (scores > scores.gather(1, labels[:, None])).sum(1)
    return {
        "val/loss": F.cross_entropy(scores, labels).item(),
        "val/top1": (places < 1).double().mean().item(),
        "val/top5": (places < 5).double().mean().item(),
        "val/count": len(labels),
    }


def test_one_process_gives_the_means_over_the_whole_set(alone: dict) -> None:
    for name in CASES.keys() - {"batchnorm"}:
        assert alone[name]["metrics"] == pytest.approx(by_hand(CASES[name]), rel=1e-6), name
    assert alone["21 of 4 rows"]["metrics"]["val/count"] == 21
    assert alone["bad image"]["metrics"]["val/count"] == 6
    assert alone["bad image"]["bad"] == 1


@pytest.mark.parametrize("n", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same(n: int, alone: dict, images: Path) -> None:
    found = run_ranks(n, run, str(images))
    for name, wanted in alone.items():
        got = found[0][name]
        assert got["metrics"] == pytest.approx(wanted["metrics"], rel=1e-6), name
        assert all(f[name]["metrics"] == got["metrics"] for f in found), name
        assert got["bad"] == wanted["bad"]
        for key, value in wanted["totals"].items():
            assert got["totals"][key] == pytest.approx(value, rel=1e-6, abs=1e-9), (name, key)
        assert got["totals"]["confusion"].sum() == got["metrics"]["val/count"]
        for a, b in zip(got["worst"], wanted["worst"], strict=True):
            assert a == pytest.approx(b, rel=1e-5), name


def test_equal_losses_among_the_worst_are_no_error() -> None:
    """Copies of one image: nothing but their number tells them apart."""
    with joined() as world:
        job = job_of(composed(*OWN, "model._target_=toys.Mlp", "data.val_samples=90"), world)
        with torch.no_grad():
            for p in job.engine.module.parameters():
                p.zero_()
        found = evaluated(job)
    assert [w[0] for w in found["worst"]] == pytest.approx([math.log(3)] * 16)


class Ragged:
    """A task whose loss is the sum over what a sample has, of which some have nothing."""

    def weight(self, batch: object) -> torch.Tensor:
        return batch.target % 3

    def loss(self, output: torch.Tensor, batch: object) -> torch.Tensor:
        return (batch.target % 3) * 2.0


def test_weights_make_the_loss_a_mean_over_what_is_weighed() -> None:
    with joined() as world:
        job = job_of(composed(*OWN, "model._target_=toys.Mlp", "data.val_samples=20"), world)
        job.engine.task = Ragged()
        result = evaluate(job.engine, evaluation_set(job, job.data.val), world)
    assert result.metrics == {"val/loss": 2.0, "val/count": 20}
    assert result.totals["weight"] == sum(i % 3 for i in range(20))


def test_the_default_summary_divides_sums_by_the_count() -> None:
    totals = {"loss": 6.0, "weight": 12.0, "count": 4.0, "hits": 3.0}
    tensors = {k: torch.tensor(v) for k, v in totals.items()} | {"table": torch.ones(2, 2)}
    assert summarize(tensors) == {"loss": 0.5, "hits": 0.75, "count": 4}


def test_bf16_evaluates_the_loss_in_fp32() -> None:
    given = (*OWN, "model._target_=toys.Mlp", "data.val_samples=50")
    with joined() as world:
        fine = evaluated(job_of(composed(*given), world, change=perturb))
        job = job_of(composed(*given, "trainer.precision=bf16"), world, change=perturb)
        coarse = evaluated(job)
    losses = [w[0] for w in coarse["worst"]]
    assert losses == pytest.approx([w[0] for w in fine["worst"]], rel=5e-2)
    as_bf16 = torch.tensor(losses).bfloat16().float().tolist()
    assert as_bf16 != losses  # more digits than bf16 has
