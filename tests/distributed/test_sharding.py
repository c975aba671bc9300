"""What is split really is: bytes a rank, equal copies, random streams, and saving in a layout."""

import os
import re
from pathlib import Path

import pytest
import torch
import toys
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


def note_what_lives(rank: int) -> None:
    """Print, where training begins, how many values all parameters of this process hold."""
    import gc

    from torch._subclasses.fake_tensor import FakeTensor

    from meshwork import modes

    def noted(job, fit=modes.MODES["train"]):
        gc.collect()
        found = (p for p in gc.get_objects() if isinstance(p, torch.nn.Parameter))
        alive = {id(p): p.numel() for p in found if not isinstance(p, FakeTensor)}
        own = sum(p.numel() for _, p in job.engine.named_parameters())
        print(f"alive {sum(alive.values())} own {own}")
        return fit(job)

    modes.MODES["train"] = noted


def test_a_rank_of_a_pipeline_keeps_no_other_rank_s_stages_in_memory(tmp_path: Path) -> None:
    given = [*VIT, "parallel=pipeline", "logger=none", "data.workers=0", "trainer.max_steps=1"]
    ended = train(2, *given, cwd=tmp_path, before=note_what_lives)
    assert ended.codes == [0, 0], ended.all_err
    for out in ended.out:
        alive, own = map(int, re.search(r"alive (\d+) own (\d+)", out).groups())
        assert alive == own > 10_000


def test_what_goes_wrong_inside_a_layout_is_a_sentence(tmp_path: Path) -> None:
    own = ["data._target_=toys.noise", "data.image_size=8", "model=timm", "model.name=own"]
    hungry = [*own, "model._target_=toys.Woven", "model.args.hungry=true", "logger=none"]
    hungry += ["parallel=pipeline", "trainer.global_batch_size=16", "data.workers=0"]
    ended = train(2, *hungry, cwd=tmp_path, before=toys.allow)
    assert max(ended.codes) == 2
    assert "out of memory on the host with micro-batches of 2: type" in ended.all_err
    assert "Traceback" not in ended.all_err
    for split in ("train", "val"):
        for name in "ab":
            (tmp_path / "birds" / split / name).mkdir(parents=True)
            (tmp_path / "birds" / split / name / "0.jpg").write_bytes(b"no image")
    broken = ["data=imagefolder", "data.root=birds", "parallel=fsdp", "model=resnet18"]
    ended = train(2, *broken, "trainer.global_batch_size=2", "logger=none", cwd=tmp_path)
    assert ended.codes == [2, 2] and "Set data.on_bad_image=skip" in ended.all_err
    assert "Traceback" not in ended.all_err
