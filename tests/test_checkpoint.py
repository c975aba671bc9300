"""Checkpoints: what is in them, which stay, which are refused, and that none runs code."""

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
from jobs import composed, job_of, joined, steps
from ranks import run_ranks, train
from torch.distributed.checkpoint import FileSystemWriter

from meshwork import checkpoint, resume, trainer
from meshwork.checkpoint import Position, read_model
from meshwork.checkpoint_files import MARKER, STATE, complete, newest, read_state
from meshwork.config import ConfigError
from meshwork.job import load
from meshwork.models.weights import read_weights
from meshwork.resume import candidates
from meshwork.rundir import RunDir
from meshwork.tensor_files import entries_of

OWN = ("model=timm", "model.name=own", "data._target_=toys.noise", "data.image_size=8")
MLP = (*OWN, "model._target_=toys.Mlp", "trainer.global_batch_size=32")
VIT = ("model.args={patch_size: 8, depth: 1}", "data.num_samples=64", "data.val_samples=20")


def trained(folder: Path, *given: str, n_steps: int = 2) -> Path:
    """A checkpoint after n_steps steps in one process."""
    with joined() as world:
        job = job_of(composed(*given, f"trainer.max_steps={n_steps}"), world, folder)
        return trainer.fit(job).checkpoint


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("honest"), *MLP)


# ---- what is in it -------------------------------------------------------------------------------


def saved_by_two(rank: int, folder: str) -> None:
    with joined(dict(os.environ)) as world:
        trainer.fit(job_of(composed(*VIT, "trainer.max_steps=2"), world, Path(folder)))


def test_names_are_those_of_the_bare_model_on_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, saved_by_two, str(tmp_path))
    plain = timm.create_model(
        "test_vit", num_classes=10, in_chans=1, img_size=32, patch_size=8, depth=1
    )
    path = newest(tmp_path)
    weights = read_model(path)
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    moments = {k for k in entries_of(path) if k.startswith("optimizer.")}
    for name, parameter in plain.named_parameters():
        assert entries_of(path)[f"optimizer.{name}.exp_avg"].size == parameter.shape
        assert f"optimizer.{name}.step" in moments
    assert len(moments) == 3 * len(list(plain.parameters()))
    assert {k for k in entries_of(path) if k.startswith("rng.")} == {"rng.0.cpu", "rng.1.cpu"}


def test_all_but_tensors_is_json(honest: Path) -> None:
    state = json.loads((honest / STATE).read_text())
    assert {k: state[k] for k in ("step", "samples", "epoch", "offset", "order_version")} == {
        "step": 2,
        "samples": 64,
        "epoch": 0,
        "offset": 64,
        "order_version": 1,
    }
    assert (state["seed"], state["global_batch_size"], state["optimizer"]) == (0, 32, "AdamW")
    assert sorted(p.suffix for p in honest.iterdir()) == ["", ".distcp", ".json", ".json"]
    assert json.loads((honest / MARKER).read_text())["files"].keys() == {
        p.name for p in honest.iterdir() if p.name != MARKER
    }


def test_the_newest_keep_and_the_best_stay(tmp_path: Path) -> None:
    """Of ten checkpoints; the best validation was that of step 3."""
    with joined() as world:
        given = (*MLP, "trainer.max_steps=10", "checkpoint.every_n_steps=1", "checkpoint.keep=2")
        job = job_of(composed(*given, "trainer.val_every_n_steps=1"), world, tmp_path)
        losses = iter([5, 4, 1, 2, 3, 4, 5, 6, 7, 8])

        class Told:
            """Cross-entropy whose validation loss is told in advance."""

            def loss(self, output: torch.Tensor, batch: object) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(output, batch.target, reduction="none")

            def summarize(self, totals: dict) -> dict:
                return {"loss": next(losses)}

        job.engine.task = Told()
        outcome = trainer.fit(job)
    assert outcome.best == {"step": 3, "val/loss": 1}
    assert [p.name for p in complete(tmp_path)] == ["step_3", "step_9", "step_10"]


def optimizer_names() -> list[str]:
    """One of each kind of state: numbers, factors, counters of groups, none."""
    return (
        "adabelief adafactor adafactorbv adamp adan adopt clamb lamb laprop lars lion madgrad mars "
        "muon nadam nadamlegacy novograd radamlegacy rmsproptf sgdp adamuon cadan"
    ).split()


def test_timm_optimizers_go_on_bit_for_bit_from_a_checkpoint(tmp_path: Path) -> None:
    """Whatever they keep: tensors, whole numbers, fractions, counts of a group."""
    cfg = composed(*MLP, "optimizer=timm", "optimizer.name=lamb", "optimizer.lr=1e-3")
    with joined() as world:
        for name in optimizer_names():
            cfg.optimizer.name = name
            whole = job_of(cfg, world)
            steps(whole, 2)
            saver = checkpoint.Saver(cfg.checkpoint, tmp_path / name, world)
            saver.save(whole.engine, whole.optimizer, None, Position(step=2), {})
            folder = saver.wait()
            wanted = steps(whole, 2)
            again = job_of(cfg, world)
            state = read_state(folder)
            checkpoint.load(folder, state, again.engine, again.optimizer, None, world)
            found = steps(again, 2)
            assert found["losses"] == wanted["losses"], name
            for key, value in wanted["weights"].items():
                assert torch.equal(value, found["weights"][key]), (name, key)


# ---- what is typed -------------------------------------------------------------------------------


def test_a_run_a_checkpoints_folder_and_a_checkpoint_can_be_named(honest: Path) -> None:
    run = honest.parent.parent
    here, elsewhere = (RunDir(path, "test", 1) for path in (run, Path("elsewhere")))
    for typed in (run, honest.parent, honest):
        assert candidates(str(typed), elsewhere) == [honest]
    assert candidates("auto", here) == candidates("best", here) == [honest]
    assert candidates("auto", elsewhere) == candidates("never", here) == []
    with pytest.raises(ConfigError, match=r"checkpoint.resume=best: .* has no best.json"):
        candidates("best", elsewhere)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, honest: Path) -> None:
    shutil.copytree(honest, tmp_path / "step_5")
    (tmp_path / "step_5" / MARKER).unlink()  # never completed
    for typed, said in (
        (tmp_path, "holds no complete checkpoint"),
        ("/not/here", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=f"checkpoint.resume={typed} {said}"):
            resume.check(str(typed))


def test_a_checkpoint_of_another_model_lists_what_differs(honest: Path) -> None:
    with joined() as world:
        job = job_of(composed(*MLP, "model.args.hidden=8", f"checkpoint.resume={honest}"), world)
        with pytest.raises(ConfigError) as error:
            load(job, True)
        text = str(error.value)
        assert str(honest) in text and "3 in all" in text
        assert "first.weight has shape [16, 64], here [8, 64]" in text
        deeper = job_of(composed(*OWN, "model._target_=toys.Unused"), world)
        with pytest.raises(ConfigError, match=r"aux\.0\.weight is missing.*4 in all"):
            checkpoint.load(honest, {}, deeper.engine, None, None, world)


def test_the_seed_goes_on_and_another_optimizer_starts_afresh(honest: Path) -> None:
    given = (*MLP, f"checkpoint.resume={honest}", "seed=7", "optimizer=sgd")
    with joined() as world:
        job = job_of(composed(*given), world)
        outcome = load(job, True)
        assert outcome.position == Position(2, 64, 0, 64) and job.cfg.seed == 0
        assert job.report.notes == [
            "seed: 0 in the checkpoint, 7 asked, 0 used",
            "optimizer.lr: 0.001 in the checkpoint, 0.1 asked, 0.1 used",
            f"loaded {honest}: step 2, epoch 0",
            "SGD starts afresh: the checkpoint has the state of AdamW",
        ]
        assert not job.optimizer.state
        steps(job, 1)
        weights_only = job_of(composed(*given, "mode=validate"), world)
        load(weights_only, False)
        assert weights_only.cfg.seed == 7


# ---- what is never saved -------------------------------------------------------------------------


def test_a_run_that_explodes_ends_with_a_sentence_and_saves_nothing_that_is_not_finite(
    tmp_path: Path,
) -> None:
    given = [
        *VIT,
        "trainer.global_batch_size=16",
        "optimizer=sgd",
        "optimizer.lr=1e3",
        "logger=none",
    ]
    given += ["checkpoint.every_n_steps=1", "checkpoint.keep=9", "trainer.max_epochs=20"]
    given += ["scheduler.warmup_steps=70", "data.workers=0", "trainer.val_every_n_epochs=null"]
    ended = train(1, *given, "run.dir=run", cwd=tmp_path)
    assert ended.codes == [1]
    said = ended.all_err.strip().splitlines()[-1]
    last = newest(tmp_path / "run")
    assert said.startswith("error: the loss is not finite at or before step ")
    assert f"the last good checkpoint is {last}: lower optimizer.lr" in said
    for path in complete(tmp_path / "run"):
        assert all(v.isfinite().all() for v in read_model(path).values()), path


# ---- what a stranger sends -----------------------------------------------------------------------


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.marker}",)


def complete_again(folder: Path) -> None:
    """Whoever plants something also makes the checksums fit."""
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != MARKER}
    facts = {name: [len(data), zlib.crc32(data)] for name, data in files.items()}
    (folder / MARKER).write_text(json.dumps({"files": facts}))


def evil_metadata(folder: Path, marker: Path) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    return ".metadata"


def evil_entry(folder: Path, marker: Path) -> str:
    """Honest metadata, but for one attribute."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Evil(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata"


def bytes_entry(folder: Path, marker: Path) -> str:
    """An object that torch would unpickle without asking."""
    shutil.rmtree(folder)
    dcp.save({"model.x": Evil(marker)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    state = {"step": 1, "samples": 1, "epoch": 0, "offset": 1}
    (folder / STATE).write_text(json.dumps(state))
    return ".metadata"


def evil_state(folder: Path, marker: Path) -> str:
    (folder / STATE).write_bytes(pickle.dumps(Evil(marker)))
    return STATE


def evil_data(folder: Path, marker: Path) -> str:
    """The file of the tensors; metadata that leads straight to the payload."""
    data = next(folder.glob("*.distcp"))
    torch.save(Evil(marker), data)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, data.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return data.name


@pytest.mark.parametrize(
    "plant",
    [evil_metadata, evil_entry, bytes_entry, evil_state, evil_data],
    ids=lambda f: f.__name__,
)
def test_a_checkpoint_from_a_stranger_runs_nothing_and_names_the_file(
    plant: object, honest: Path, tmp_path: Path
) -> None:
    folder, marker = tmp_path / "evil", tmp_path / "marker"
    shutil.copytree(honest, folder)
    file = folder / plant(folder, marker)
    complete_again(folder)
    with joined() as world:
        with pytest.raises(ConfigError) as error:
            load(job_of(composed(*MLP, f"checkpoint.resume={folder}"), world), True)
        assert str(file) in str(error.value)
        if plant is not evil_state:
            with pytest.raises(ConfigError, match=file.name):
                read_weights(str(folder))
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))  # the payload itself works
    assert marker.exists()


@pytest.mark.parametrize("name", ["weights.pth", "weights.bin", "weights.safetensors"])
def test_weights_from_a_stranger_run_nothing_and_name_the_file(name: str, tmp_path: Path) -> None:
    file, marker = tmp_path / name, tmp_path / "marker"
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        write({"state_dict": {"head.weight": Evil(marker)}}, file)
        with pytest.raises(ConfigError, match=f"model.checkpoint_path={file}"):
            read_weights(str(file))
    assert not marker.exists()


def test_refusing_is_one_sentence_and_two_ranks_end(honest: Path, tmp_path: Path) -> None:
    folder, marker = tmp_path / "evil", tmp_path / "marker"
    trained(tmp_path, *VIT)
    shutil.copytree(newest(tmp_path), folder)
    evil_data(folder, marker)
    complete_again(folder)
    given = [*VIT, "logger=none", "data.workers=0", f"checkpoint.resume={folder}"]
    ended = train(2, *given, cwd=tmp_path)
    assert 0 not in ended.codes and not marker.exists()
    told = [line for line in ended.all_err.splitlines() if "error:" in line]
    assert len(told) == 1 and ".distcp cannot be read" in told[0]


def test_an_honest_checkpoint_is_read_without_running_code(honest: Path) -> None:
    weights = read_weights(str(honest))
    assert weights.keys() == {"first.weight", "first.bias", "second.weight", "second.bias"}
    assert all(type(v) is torch.Tensor for v in weights.values())
