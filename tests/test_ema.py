"""Averaged weights, and a run that ends early."""

import os
from pathlib import Path

import pytest
import torch
from jobs import composed, job_of, joined
from ranks import run_ranks, train

from meshwork import trainer
from meshwork.checkpoint import Position
from meshwork.data.loader import eval_steps
from meshwork.trainer import advance, train_batches

OWN = ("model=timm", "model.name=own", "data._target_=toys.noise", "data.image_size=8")
MLP = (*OWN, "model._target_=toys.Mlp", "trainer.global_batch_size=32", "trainer.ema_decay=0.3")
QUICK = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=32")
QUICK += ("data.val_samples=16", "trainer.global_batch_size=8", "run.dir=run")


def test_the_average_is_the_formula_warm_up_included() -> None:
    """d = min(0.3, (1 + step) / (10 + step)), and micro-batches do not count."""
    with joined() as world:
        job = job_of(composed(*MLP, "trainer.micro_batch_size=8"), world)
        wanted = {n: p.detach().clone() for n, p in job.engine.named_parameters()}
        batches, position = train_batches(job, Position()), Position()
        for _ in range(6):
            batch = next(batches)
            job.engine.step(batch)
            job.engine.update(job.optimizer)
            advance(position, batch.total, job)
            job.ema.update(position.step)
            d = min(0.3, (1 + position.step) / (10 + position.step))
            for name, p in job.engine.named_parameters():
                wanted[name] = d * wanted[name] + (1 - d) * p.detach()
    assert all(torch.allclose(job.ema.weights[n], w, atol=1e-7) for n, w in wanted.items())


def swap_and_fail(rank: int) -> bool:
    with joined(dict(os.environ)) as world:
        job = job_of(composed(*MLP, "parallel=fsdp", "trainer.max_steps=3"), world)
        trainer.fit(job)
        before = {n: p.full_tensor().clone() for n, p in job.engine.named_parameters()}
        averages = {n: w.full_tensor().clone() for n, w in job.ema.weights.items()}
        with pytest.raises(ValueError), job.ema.swapped(job.engine):
            for name, p in job.engine.named_parameters():
                assert torch.equal(p.full_tensor(), averages[name])
            raise ValueError("amid the evaluation")
        same = [torch.equal(p.full_tensor(), before[n]) for n, p in job.engine.named_parameters()]
        kept = [torch.equal(w.full_tensor(), averages[n]) for n, w in job.ema.weights.items()]
        moved = [not torch.equal(before[n], averages[n]) for n in before]
        return all(same) and all(kept) and all(moved)


def test_weights_are_back_in_their_place_after_an_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_ranks(2, swap_and_fail) == [True, True]


def test_both_are_validated_and_the_objective_may_be_the_averages(tmp_path: Path) -> None:
    given = ("trainer.ema_decay=0.9", "trainer.max_epochs=2", "objective.metric=val_ema/loss")
    ended = train(1, *QUICK, *given, cwd=tmp_path)
    assert ended.codes == [0], ended.all_err
    assert [line["step"] for line in ended.lines("val_ema/loss")] == [4, 8]
    assert [line["step"] for line in ended.lines("val/loss")] == [4, 8]
    best = ended.result()["best"]
    assert ended.result()["objective"]["value"] == best["val_ema/loss"] != best["val/loss"]


def test_a_run_ends_after_so_many_validations_without_a_gain(tmp_path: Path) -> None:
    """Nothing is learnt at a rate of 0: the first validation stays the best."""
    given = (*QUICK, "optimizer.lr=0", "optimizer.weight_decay=0", "trainer.max_epochs=20")
    given += ("trainer.early_stop=2",)
    ended = train(2, *given, cwd=tmp_path)
    assert ended.codes == [0, 0], ended.all_err
    result = ended.result()
    assert (result["state"], result["step"], result["best"]["step"]) == ("finished", 12, 4)
    again = train(2, *given, cwd=tmp_path)
    assert again.codes == [0, 0]
    assert "2 validations since the best: nothing left to train" in again.all_out


def test_evaluation_steps_are_as_many_on_every_rank() -> None:
    """Else a request to stop amid a validation would leave ranks waiting."""
    for n in (1, 7, 21, 359):
        assert len({len(eval_steps(n, 4, rank, 3)) for rank in range(3)}) == 1
