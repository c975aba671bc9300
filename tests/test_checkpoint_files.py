"""Damaged, torn and crowded folders of checkpoints: found out, left out, never taken for good."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import composed, job_of, joined
from ranks import train

from meshwork import checkpoint_files, trainer
from meshwork.checkpoint_files import MARKER, STATE, complete, problem, steps, tidy
from meshwork.config import ConfigError
from meshwork.job import load

OWN = ("model=timm", "model.name=own", "data._target_=toys.noise", "data.image_size=8")
MLP = (*OWN, "model._target_=toys.Mlp", "trainer.global_batch_size=32")
SAVING = (*MLP, "checkpoint.every_n_steps=1", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with three checkpoints."""
    folder = tmp_path_factory.mktemp("three")
    with joined() as world:
        trainer.fit(job_of(composed(*SAVING, "trainer.max_steps=3"), world, folder))
    return folder


def halve_the_tensors(path: Path) -> Path:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return file


def flip_a_bit(path: Path) -> Path:
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def flip_a_bit_of_the_state(path: Path) -> Path:
    text = (path / STATE).read_text()
    (path / STATE).write_text(text.replace('"samples": 96', '"samples": 86'))
    return path / STATE


def empty_the_metadata(path: Path) -> Path:
    (path / ".metadata").write_bytes(b"")
    return path / ".metadata"


def remove_the_tensors(path: Path) -> Path:
    file = next(path.glob("*.distcp"))
    file.unlink()
    return file


def remove_the_marker(path: Path) -> Path:
    (path / MARKER).unlink()
    return path / MARKER


def garble_the_marker(path: Path) -> Path:
    (path / MARKER).write_text("[]")
    return path / MARKER


DAMAGES = [
    halve_the_tensors,
    flip_a_bit,
    flip_a_bit_of_the_state,
    empty_the_metadata,
    remove_the_tensors,
    remove_the_marker,
    garble_the_marker,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_newest_is_left_out_for_the_next_older(
    damage: Callable, three: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(three, tmp_path / "run")
    newest = steps(folder)[-1]
    assert problem(newest) is None
    file = damage(newest)
    assert str(file) in problem(newest)
    with joined() as world:
        job = job_of(composed(*SAVING, "trainer.max_steps=3"), world, folder)
        assert load(job, True).position.step == 2
        assert str(file) in job.report.notes[0] and job.report.notes[0].endswith("left out")
        assert trainer.fit(job).position.step == 3  # and its place is taken by a good one
    assert [p.name for p in complete(folder)] == ["step_1", "step_2", "step_3"]
    assert problem(folder / "checkpoints" / "step_3") is None


def test_a_damaged_checkpoint_that_was_named_is_an_error(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "run")
    path = steps(folder)[-1]
    file = flip_a_bit(path)
    for typed in (folder, path):
        with joined() as world, pytest.raises(ConfigError, match=str(file)):
            job_of(composed(*MLP, f"checkpoint.resume={typed}"), world, tmp_path / "new")
    assert path.is_dir()


def test_where_none_is_good_the_run_does_not_start_afresh(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "run")
    for path in steps(folder):
        remove_the_marker(path)
    with joined() as world, pytest.raises(ConfigError, match=r"checkpoint\.resume=never starts"):
        job_of(composed(*MLP), world, folder)


def test_leftovers_of_a_kill_are_ignored_and_removed(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "run")
    torn = folder / "checkpoints" / ".step_9.partial"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    assert [p.name for p in steps(folder)] == ["step_1", "step_2", "step_3"]
    tidy(folder / "checkpoints", 9, None)
    assert not torn.exists()


def test_the_best_stays_and_is_named(tmp_path: Path) -> None:
    for n in range(1, 6):
        path = tmp_path / f"step_{n}"
        path.mkdir()
        (path / MARKER).write_text("{}")
    tidy(tmp_path, 2, {"step": 2, "val/loss": 0.5})
    assert [p.name for p in complete(tmp_path)] == ["step_2", "step_4", "step_5"]
    assert checkpoint_files.best(tmp_path) == tmp_path / "step_2"
    assert json.loads((tmp_path / "best.json").read_text())["val/loss"] == 0.5
    assert checkpoint_files.best(tmp_path / "elsewhere") is None


# ---- no room -------------------------------------------------------------------------------------

BIG = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=64")
BIG += ("trainer.global_batch_size=8", "trainer.max_steps=6", "trainer.val_every_n_epochs=null")
BIG += ("checkpoint.every_n_steps=1", "checkpoint.keep=100", "run.dir=run", "parallel=fsdp")


def little_room(rank: int) -> None:
    """From the fourth checkpoint on the disk says amid the writing that it is full."""
    import errno
    import os

    from meshwork import tensor_files

    room = int(os.environ["ROOM"]) // 2
    written = 0

    class Full:
        """A file of a disk with so much room."""

        def __init__(self, file: Any):
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            nonlocal written
            written += len(data)
            if written > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    counted = tensor_files._Counted
    tensor_files._Counted = lambda file: counted(Full(file))


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk_is_a_sentence_and_earlier_checkpoints_are_intact(
    policy: str, tmp_path: Path
) -> None:
    """Three checkpoints of about 3 MiB fit, the fourth breaks off amid its writing."""
    given = (*BIG, f"checkpoint.on_full_disk={policy}")
    env = {"ROOM": str(11 << 20)}
    ended = train(2, *given, cwd=tmp_path, before=little_room, env=env)
    assert 0 not in ended.codes, ended.all_out
    said = [line for line in ended.all_err.splitlines() if "the disk is full" in line]
    assert len(said) == 1, ended.all_err
    assert "Traceback" not in ended.all_err
    assert f"{tmp_path / 'run' / 'checkpoints' / 'step_'}" in said[0]
    assert "bytes, " in said[0] and "are free" in said[0]
    told = ended.all_out.count("training goes on without this checkpoint")
    good = complete(tmp_path / "run")
    assert good and all(problem(path) is None for path in good)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*partial"))
    assert told == (6 - len(good) - 1 if policy == "continue" else 0)
    then = train(2, *BIG, cwd=tmp_path)  # there is room again
    assert then.codes == [0, 0] and f"{good[-1].name}: step" in then.all_out
