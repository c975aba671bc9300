"""The seam for research: one's own inputs, targets, losses, weights, metrics, helpers, hooks."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import toys
from jobs import composed, job_of, joined, perturb
from ranks import train

from meshwork.batch import Batch
from meshwork.checkpoint import Position, read_model
from meshwork.checkpoint_files import newest
from meshwork.tasks import Classification
from meshwork.trainer import fit, train_batches

OWN = ("model=timm", "model.name=own", "logger=none", "data.workers=0")
ROWS = (*OWN, "data._target_=toys.rows", "model._target_=toys.TwoInputs", "optimizer.lr=0.01")
MLP = (*OWN, "data._target_=toys.noise", "data.image_size=8", "model._target_=toys.Mlp")


def batch_of(output: torch.Tensor, target: torch.Tensor) -> Batch:
    return Batch((output,), target, torch.ones(len(target)), len(target), uniform=True)


# ---- a task of one's own -------------------------------------------------------------------------


def by_hand(model: torch.nn.Module, indices: list[int], data: toys.Rows) -> dict[str, float]:
    """Means over the valid things of these samples, one sample at a time."""
    sums = dict.fromkeys(("loss", "entropy", "error", "valid", "plain error", "hits"), 0.0)
    for i in indices:
        row = data[i]
        with torch.no_grad():
            out = model(row["image"][None], row["mask"][None])
        label = torch.tensor([row["label"]["class"]])
        entropy = F.cross_entropy(out["scores"], label).item()
        error = float((out["size"][0] - row["label"]["more"]["size"]) ** 2)
        sums["entropy"] += entropy * row["valid"]
        sums["error"] += error * row["valid"]
        sums["loss"] += (entropy + error) * row["valid"]
        sums["valid"] += row["valid"]
        sums["plain error"] += error
        sums["hits"] += int(out["scores"].argmax()) == int(label)
    return sums


def test_a_dict_becomes_two_inputs_and_a_nested_target() -> None:
    cfg = composed(*ROWS, "task._target_=toys.ClassAndSize", "trainer.global_batch_size=6")
    with joined() as world:
        batch = next(train_batches(job_of(cfg, world), Position()))
    image, mask = batch.inputs
    assert image.shape == mask.shape == (6, 4)
    assert batch.target.keys() == {"label", "valid"}
    assert batch.target["label"]["class"].dtype == torch.int64
    assert batch.target["label"]["more"]["size"].shape == (6,)


def test_loss_parts_and_weights_are_means_over_what_is_weighed() -> None:
    """Over all micro-batches of the step, not a mean of their means."""
    cfg = composed(
        *ROWS,
        "task._target_=toys.ClassAndSize",
        "trainer.global_batch_size=30",
        "trainer.micro_batch_size=4",
    )
    with joined() as world:
        job = job_of(cfg, world, change=perturb)
        samples = [i for i in range(90)]
        order = next(train_batches(job, Position())).inputs[0][:30]
        rows = [i for x in order for i in samples if torch.equal(job.data.train[i]["image"], x)]
        wanted = by_hand(job.engine.module, rows, job.data.train)
        shares = job.engine.step(next(train_batches(job, Position())))
    assert len(rows) == 30
    for name in ("loss", "entropy", "error"):
        assert shares[name].item() == pytest.approx(wanted[name] / wanted["valid"], rel=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_logs_parts_and_its_own_metrics(n: int, tmp_path: Path) -> None:
    """Best is what the task's objective says; the metrics are those of the saved weights."""
    given = [*ROWS, "task._target_=toys.ClassAndSize", "trainer.max_epochs=2"]
    given += ["trainer.global_batch_size=30", "trainer.log_every_n_steps=1"]
    ended = train(n, *given, cwd=tmp_path, before=toys.allow)
    assert ended.codes == [0] * n, ended.all_err
    for line in ended.lines("train/loss"):
        assert line["train/loss"] == pytest.approx(line["train/entropy"] + line["train/error"])
    model = toys.TwoInputs()
    model.load_state_dict(read_model(newest(ended.folder)))
    wanted = by_hand(model, list(range(21)), toys.Rows(21))
    found = ended.lines("val/loss")[-1]
    assert found["val/count"] == 21
    assert found["val/loss"] == pytest.approx(wanted["loss"] / wanted["valid"], rel=1e-5)
    assert found["val/error"] == pytest.approx(wanted["plain error"] / 21, rel=1e-5)
    assert found["val/accuracy"] == pytest.approx(wanted["hits"] / 21)
    best = min(ended.lines("val/error"), key=lambda line: line["val/error"])
    assert ended.result()["objective"]["metric"] == "val/error"
    assert ended.result()["objective"]["value"] == best["val/error"]


def test_helpers_are_frozen_and_not_saved_and_hooks_are_called(tmp_path: Path) -> None:
    teacher = "task.args.teacher={_target_: torch.nn.Linear, in_features: 4, out_features: 3}"
    cfg = composed(*ROWS, "task._target_=toys.Watched", teacher, "trainer.precision=fp64")
    cfg.trainer.global_batch_size, cfg.trainer.max_steps = 30, 4
    pictures = []
    with joined() as world:
        job = job_of(cfg, world, tmp_path)
        helper = job.engine.task.helpers["teacher"]
        before = helper.weight.clone()
        assert helper.weight.dtype == torch.float64 and not helper.training
        assert not any(p.requires_grad for p in helper.parameters())
        job.report.loggers = SimpleNamespace(image=lambda *given: pictures.append(given))
        job.report.objective = ("val/loss", "min")
        outcome = fit(job)
    assert job.engine.task.steps == [(i, 30 * i) for i in range(1, 5)]
    assert torch.equal(helper.weight, before) and not helper.training
    assert read_model(outcome.checkpoint).keys() == job.engine.module.state_dict().keys()
    # After each epoch of three steps, and at the end, the 21 samples of the validation set.
    assert [(name, image.size) for name, image, _ in pictures] == [("mask", (4, 21))] * 2


def test_helpers_and_hooks_give_the_same_on_two_ranks(tmp_path: Path) -> None:
    given = [*ROWS, "task._target_=toys.Watched", "trainer.global_batch_size=30"]
    given += ["trainer.max_steps=3", "model.freeze=[size]", "logger=none"]
    found = []
    for n in (1, 2):
        ended = train(n, *given, cwd=tmp_path, before=toys.allow)
        assert ended.codes == [0] * n, ended.all_err
        found.append(ended.result()["final"])
    for name in ("train/loss", "val/loss", "val/error"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)


def test_a_loss_of_the_wrong_shape_is_answered_by_a_sentence(tmp_path: Path) -> None:
    ended = train(1, *MLP, "task._target_=toys.WrongShape", cwd=tmp_path, before=toys.allow)
    assert ended.codes == [2]
    assert ended.all_err.strip() == (
        "error: WrongShape.loss returned shape () for 64 samples: expected one value a sample "
        "(reduction='none')"
    )


# ---- classification ------------------------------------------------------------------------------


def test_another_criterion_is_one_line() -> None:
    line = "task.criterion={_target_: torch.nn.MultiMarginLoss, margin: 0.5}"
    cfg = composed(*MLP, line, "trainer.global_batch_size=16")
    with joined() as world:
        job = job_of(cfg, world, change=perturb)
        batch = next(train_batches(job, Position()))
        found = job.engine.step(batch)["loss"].item()
        with torch.no_grad():
            scores = job.engine.module(*batch.inputs)
    wanted = torch.nn.MultiMarginLoss(margin=0.5)(scores, batch.target).item()
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_smooths_labels_over_all_classes(smoothing: float) -> None:
    torch.manual_seed(0)
    scores, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    target = torch.full((6, 4), smoothing / 4)
    target[range(6), labels] += 1 - smoothing
    wanted = -(target * scores.log_softmax(1)).sum(1)
    loss = Classification(label_smoothing=smoothing).loss(scores, batch_of(scores, labels))
    assert torch.allclose(loss, wanted, atol=1e-6)


def test_hits_and_the_confusion_matrix_are_sums() -> None:
    scores = torch.eye(7)[[0, 1, 1, 6]] * 10 + torch.arange(7).flip(0) * 0.1
    found = Classification().metrics(scores, batch_of(scores, torch.tensor([0, 1, 2, 5])))
    assert found["top1"] == 2 and found["top5"] == 3
    table = torch.zeros(7, 7, dtype=torch.long)
    for true, guess in ((0, 0), (1, 1), (2, 1), (5, 6)):
        table[true, guess] += 1
    assert torch.equal(found["confusion"], table)


def test_few_classes_have_a_top_5_and_many_no_matrix() -> None:
    few, many = torch.randn(8, 3), torch.randn(8, 51)
    labels = torch.zeros(8, dtype=torch.long)
    assert Classification().metrics(few, batch_of(few, labels))["top5"] == 8
    assert "confusion" not in Classification().metrics(many, batch_of(many, labels))
