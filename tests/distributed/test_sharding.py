"""What is split really is: bytes a rank, equal copies, random streams, and saving in a layout."""

import os
from pathlib import Path

import pytest
import torch
from jobs import composed, job_of, joined, perturb, steps
from ranks import run_ranks, train

from meshwork.parallel.fsdp import local, split_over

NETS = {
    "vit_tiny": ("model=vit_tiny", "model.args={patch_size: 8}", "data.image_size=32"),
    "convnext_tiny": ("model=timm", "model.name=convnext_tiny", "data.image_size=32"),
    "resnet50": ("model=timm", "model.name=resnet50", "trainer.micro_batch_size=4"),
}
SMALL = ("trainer.global_batch_size=16", "data.num_samples=64")
VIT = ("model.args={patch_size: 8, depth: 2}", *SMALL)


def elements(tensors) -> int:
    return sum(local(t).numel() for t in tensors)


def held(rank: int, cases: dict) -> dict:
    """Elements of parameters, gradients and optimizer state after a step, by case."""
    found = {}
    with joined(dict(os.environ)) as world:
        for name, given in cases.items():
            job = job_of(composed(*given), world)
            steps(job, 1, sync=False)
            parameters = [p for _, p in job.engine.named_parameters()]
            state = [
                t
                for values in job.optimizer.state.values()
                for t in values.values()
                if torch.is_tensor(t) and t.ndim
            ]
            split = [p for p in parameters if split_over(p, "tp") is not None]
            found[name] = {
                "names": [n for n, _ in job.engine.named_parameters()],
                "all": sum(p.numel() for p in parameters),
                "parameters": elements(parameters),
                "optimizer": elements(state),
                "split": (elements(split), sum(p.numel() for p in split)),
            }
    return found


def test_fsdp_holds_a_quarter_on_each_of_four_ranks() -> None:
    cases = {k: ("parallel=fsdp", *SMALL, *v) for k, v in NETS.items()}
    for ranks in run_ranks(4, held, cases, timeout_s=120):
        for name, found in ranks.items():
            assert found["parameters"] <= 1.05 * found["all"] / 4, name
            assert found["optimizer"] <= 1.05 * 2 * found["all"] / 4, name


def test_tensor_halves_what_it_splits_and_pipeline_holds_its_stages_alone() -> None:
    cases = {k: (f"parallel={k}", *VIT) for k in ("tensor", "pipeline")}
    first, second = run_ranks(2, held, cases)
    for found in (first["tensor"], second["tensor"]):
        mine, whole = found["split"]
        assert mine * 2 == whole and whole > 0.8 * found["all"]
    names = [set(r["pipeline"]["names"]) for r in (first, second)]
    assert not names[0] & names[1]
    assert sum(r["pipeline"]["parameters"] for r in (first, second)) == first["tensor"]["all"]


def dropped(rank: int, layouts: list) -> list:
    """Losses, and the weights that every rank of a tensor group holds, under dropout."""
    found = []
    with joined(dict(os.environ)) as world:
        for layout in layouts:
            drop = (
                "model.args={patch_size: 8, depth: 2, pos_drop_rate: 0.3}",
                "model.drop_rate=0.3",
            )
            job = job_of(composed(layout, *drop, *SMALL), world, change=perturb)
            got = steps(job, 3, sync=False)
            whole = {
                n: local(p).sum().item()
                for n, p in job.engine.named_parameters()
                if split_over(p, "tp") is None
            }
            mask = torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()
            found.append((got["losses"], whole, mask))
    return found


def test_dropout_differs_between_data_ranks_and_is_one_within_a_tensor_group() -> None:
    layouts = ["parallel=ddp", "parallel=tensor", "parallel=tensor"]
    (ddp, tensor, again), (ddp_1, tensor_1, _) = run_ranks(2, dropped, layouts)
    assert ddp[2] != ddp_1[2]
    assert tensor[2] == tensor_1[2] and tensor[1] == tensor_1[1]
    assert tensor[0] == again[0]  # reproducible


@pytest.mark.parametrize(
    ("n", "layout"),
    [
        (2, ("parallel=tensor",)),
        (2, ("parallel=pipeline", "parallel.schedule=Interleaved1F1B")),
        (4, ("parallel=fsdp_tensor",)),
    ],
)
def test_a_layout_resumes_bit_for_bit_and_gives_its_weights_to_one_process(
    n: int, layout: tuple, tmp_path: Path
) -> None:
    given = [*VIT, "logger=none", "data.workers=0", "trainer.max_steps=8", "seed=2"]
    given += ["trainer.log_every_n_steps=1", "checkpoint.every_n_epochs=null"]
    whole = train(n, *given, *layout, f"run.dir={tmp_path}/whole", cwd=tmp_path)
    part = [*given, *layout, f"run.dir={tmp_path}/part"]
    first = train(n, *part, "trainer.stop_at_step=4", cwd=tmp_path)
    second = train(n, *part, cwd=tmp_path)
    assert {*whole.codes, *first.codes, *second.codes} == {0}, whole.all_err + second.all_err
    assert f"loaded {tmp_path}/part/checkpoints/step_4" in second.all_out
    a, b = whole.lines("train/loss"), second.lines("train/loss")
    assert len(a) == len(b) == 8
    assert [x["train/loss"] for x in a] == [x["train/loss"] for x in b]
    looked = [*given, "mode=validate", f"checkpoint.resume={tmp_path}/part"]
    alone = train(1, *looked, cwd=tmp_path).result()["final"]
    for name, value in second.result()["final"].items():
        if name.startswith("val/"):
            assert alone[name] == pytest.approx(value, rel=1e-5), name
