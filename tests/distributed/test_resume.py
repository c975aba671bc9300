"""A run that was stopped and goes on is, bit for bit, the one that was never stopped."""

import os
from pathlib import Path

import pytest
import torch
from jobs import composed, job_of, joined
from ranks import run_ranks, train

from meshwork import trainer
from meshwork.checkpoint import read_model
from meshwork.checkpoint_files import complete

OWN = ("model=timm", "model.name=own", "data._target_=toys.noise", "data.image_size=8")
VIT = ("model.args={patch_size: 8, depth: 2}", "data.num_samples=160", "data.val_samples=40")
# 160 or 96 samples in batches of 32: five or three steps an epoch.
RUN = ("trainer.global_batch_size=32", "trainer.max_steps=12", "trainer.log_every_n_steps=1")
CASES = {
    "adamw, dropout, accumulation": (
        *VIT,
        "model.drop_rate=0.2",
        "model.drop_path_rate=0.2",
        "trainer.micro_batch_size=4",
    ),
    "sgd, dropout, workers": (*VIT, "model.drop_rate=0.2", "optimizer=sgd", "data.workers=2"),
    "batchnorm": (*OWN, "model._target_=toys.NormNet", "trainer.micro_batch_size=8"),
    "functional dropout, clipping, last short": (
        *OWN,
        "model._target_=toys.Dropped",
        "trainer.clip_grad_norm=0.1",
        "trainer.global_batch_size=36",
        "data.drop_last=false",
    ),
    "lamb": (*OWN, "model._target_=toys.Mlp", "optimizer=timm", "optimizer.name=lamb"),
}
STOPS = {"adamw, dropout, accumulation": (7,), "batchnorm": (6, 7)}  # else 4; 6 ends an epoch


def run(rank: int, folder: str) -> dict:
    """Lines and weights of every case, unbroken and broken."""
    n, found = int(os.environ["WORLD_SIZE"]), {}
    with joined(dict(os.environ) if n > 1 else None) as world:
        for name, given in CASES.items():
            here = Path(folder) / name.replace(" ", "_")
            whole = fitted(world, here / "whole", *RUN, *given)
            broken = []
            for stop in STOPS.get(name, (4,)):
                part = fitted(world, here / "broken", *RUN, *given, f"trainer.stop_at_step={stop}")
                broken += part["lines"]
            end = fitted(world, here / "broken", *RUN, *given)
            found[name] = (whole["lines"], broken + end["lines"], whole["draw"], end["draw"])
    return found


def fitted(world: object, folder: Path, *given: str) -> dict:
    job = job_of(composed(*given), world, folder)
    trainer.fit(job)
    draw = torch.rand(4).tolist()  # where the random stream stands
    return {"lines": job.report.train_lines, "draw": draw}


@pytest.mark.parametrize("n", [1, 2])
def test_a_resumed_run_is_bit_for_bit_the_unbroken_one(n: int, tmp_path: Path) -> None:
    found = run_ranks(n, run, str(tmp_path))
    for name in CASES:
        for whole, broken, draw, draw_broken in (f[name] for f in found):
            assert [x["step"] for x in broken] == list(range(1, 13)), name
            for key in ("train/loss", "train/grad_norm", "train/lr"):
                assert [x[key] for x in broken] == [x[key] for x in whole], (name, key)
            assert draw == draw_broken, name
        here = tmp_path / name.replace(" ", "_")
        ends = [read_model(complete(here / part)[-1]) for part in ("whole", "broken")]
        assert complete(here / "broken")[-1].name == "step_12"
        for key, value in ends[0].items():
            if "running" in key and n > 1:  # averaged over ranks at other steps: other rounding
                assert torch.allclose(value, ends[1][key], rtol=1e-5)
            else:
                assert torch.equal(value, ends[1][key]), (name, key)
    if n > 1:
        assert found[0]["batchnorm"][2] != found[1]["batchnorm"][2]  # a stream for each rank


@pytest.mark.parametrize("n", [1, 2])
def test_train_py_goes_on_where_it_was_stopped(n: int, tmp_path: Path) -> None:
    """The console, metrics.jsonl and result.json of one folder; the schedule's horizon stays."""
    given = [*VIT, *RUN, "model.drop_rate=0.1", "logger=none", "scheduler.warmup_steps=3"]
    whole = train(n, *given, "run.dir=whole", cwd=tmp_path)
    first = train(n, *given, "run.dir=broken", "trainer.stop_at_step=7", cwd=tmp_path)
    assert first.codes == [0] * n, first.all_err
    assert first.result()["state"] == "stopped" and first.result()["step"] == 7
    then = train(n, *given, "run.dir=broken", cwd=tmp_path)
    assert then.codes == whole.codes == [0] * n, then.all_err
    assert "step_7: step 7, epoch 1" in then.all_out
    lines = then.lines("train/loss")
    assert [x["attempt"] for x in lines] == [1] * 7 + [2] * 5
    for key in ("step", "samples", "epoch", "train/loss", "train/grad_norm", "train/lr"):
        assert [x[key] for x in lines] == [x[key] for x in whole.lines("train/loss")], key
    for key in ("final", "best"):
        a, b = whole.result()[key], then.result()[key]
        assert {k: a[k] for k in a if k.startswith("val")} == {
            k: b[k] for k in b if k.startswith("val")
        }
    assert then.result()["state"] == "finished"
    again = train(n, *given, "run.dir=broken", cwd=tmp_path)
    assert again.codes == [0] * n
    assert "step 12 of 12 is reached: nothing left to train" in again.all_out


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """One, two, one: the numbers of a run in one process, but for the order of its sums."""
    given = [*VIT, *RUN, "logger=none", "trainer.precision=fp64", "data.workers=0"]
    whole = train(1, *given, "run.dir=whole", cwd=tmp_path)
    for n, stop in ((1, 3), (2, 8), (1, 12)):
        part = train(n, *given, "run.dir=parts", f"trainer.stop_at_step={stop}", cwd=tmp_path)
        assert part.codes == [0] * n, part.all_err
    assert [x["attempt"] for x in part.lines("train/loss")] == [1] * 3 + [2] * 5 + [3] * 4
    for a, b in zip(whole.lines("train/loss"), part.lines("train/loss"), strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-12)
        assert (a["step"], a["samples"], a["epoch"]) == (b["step"], b["samples"], b["epoch"])
