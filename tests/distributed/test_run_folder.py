"""One run, one folder: however many ranks, nodes and attempts."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from ranks import ROOT, train

QUICK = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=16")
QUICK += ("data.val_samples=8", "trainer.global_batch_size=8", "trainer.max_steps=2")


def late(rank: int) -> None:
    time.sleep(2 * rank)


def folders(place: Path) -> list[Path]:
    return [p for p in place.iterdir() if p.is_dir() and not p.is_symlink()]


def test_ranks_that_start_seconds_apart_share_one_folder(tmp_path):
    ended = train(2, *QUICK, cwd=tmp_path, before=late)
    assert ended.codes == [0, 0], ended.all_err
    assert os.listdir(tmp_path) == ["outputs"]
    assert len(folders(tmp_path / "outputs")) == 1
    assert sorted(p.name for p in (ended.folder / "logs").glob("*.log")) == [
        "rank0.log",
        "rank1.log",
    ]
    assert sorted(os.listdir(ended.folder / ".hydra")) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert (tmp_path / "outputs" / "latest").resolve() == ended.folder
    typed = OmegaConf.load(ended.folder / ".hydra" / "overrides.yaml")
    assert list(typed) == list(QUICK)


def test_runs_of_the_same_second_differ(tmp_path):
    names = {train(1, *QUICK, "mode=validate", cwd=tmp_path).folder.name for _ in range(3)}
    assert len(names) == 3


def test_the_folder_says_what_the_run_was(tmp_path):
    ended = train(1, *QUICK, "seed=5", cwd=tmp_path)
    config = OmegaConf.load(ended.folder / "config.yaml")
    assert config.seed == 5 and config.run.root == str(tmp_path / "outputs")
    status = json.loads((ended.folder / "status.json").read_text())
    assert (status["state"], status["attempt"], status["step"]) == ("finished", 1, 2)
    result = ended.result()
    assert (result["state"], result["step"], result["samples"]) == ("finished", 2, 16)
    assert result["objective"]["metric"] == "val/top1"
    assert result["objective"]["value"] == result["best"]["val/top1"]
    assert Path(result["checkpoint"]["last"]).name == "step_2"
    provenance = json.loads((ended.folder / "provenance.json").read_text())
    assert provenance["packages"]["torch"] and "seed=5" in provenance["command"]
    line = ended.lines("train/loss")[-1]
    assert {"step", "samples", "epoch", "time", "attempt"} <= set(line)


def test_run_dir_is_the_exact_folder_and_keeps_each_attempts_config(tmp_path):
    first = train(1, *QUICK, "run.dir=mine", cwd=tmp_path)
    again = train(1, *QUICK, "run.dir=mine", "trainer.max_steps=4", cwd=tmp_path)
    assert first.folder == again.folder == tmp_path / "mine"
    assert "attempt 2" in again.all_out and "step 2, epoch 1" in again.all_out
    assert OmegaConf.load(first.folder / "config.yaml").trainer.max_steps == 2
    assert OmegaConf.load(first.folder / "config.attempt_2.yaml").trainer.max_steps == 4
    assert [(line["step"], line["attempt"]) for line in again.lines("train/loss")] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]


def test_a_finished_run_started_again_says_so(tmp_path):
    train(1, *QUICK, "run.dir=mine", cwd=tmp_path)
    again = train(1, *QUICK, "run.dir=mine", cwd=tmp_path)
    assert again.codes == [0]
    assert "nothing left to train" in again.all_out
    assert again.result()["state"] == "finished"


def test_a_typed_id_returns_to_its_folder_and_an_exported_one_only_to_its_own_run(tmp_path):
    typed = [train(1, *QUICK, "run.id=mine", f"seed={s}", cwd=tmp_path).folder for s in (1, 2)]
    assert typed[0] == typed[1] and typed[0].name.endswith("_mine")
    env = {"MESHWORK_RUN_ID": "job7"}
    stopped = train(1, *QUICK, "trainer.stop_at_step=1", cwd=tmp_path, env=env)
    back = train(1, *QUICK, "trainer.stop_at_step=1", cwd=tmp_path, env=env)
    assert stopped.folder == back.folder and back.folder.name.endswith("_job7")
    other = train(1, *QUICK, "seed=9", cwd=tmp_path, env=env)
    assert other.folder.name.endswith("_job7-2")
    assert "other overrides" in other.all_out and "job7-2" in other.all_out
    finished = train(1, *QUICK, "seed=9", cwd=tmp_path, env=env)
    assert not finished.folder.name.endswith("_job7")


def test_paths_mean_from_where_the_command_was_typed(tmp_path):
    train(1, *QUICK, "run.dir=a", cwd=tmp_path)
    below = tmp_path / "below"
    below.mkdir()
    for chdir in ("true", "false"):
        ended = train(
            1,
            *QUICK,
            "checkpoint.resume=../a",
            "trainer.max_steps=3",
            f"hydra.job.chdir={chdir}",
            cwd=below,
        )
        assert ended.codes == [0], ended.all_err
        assert f"loaded {tmp_path / 'a'}" in ended.all_out
        saved = OmegaConf.load(ended.folder / "config.yaml")
        assert saved.checkpoint.resume == str(tmp_path / "a")
        assert ended.folder.parent == below / "outputs"


def test_a_resume_path_that_is_not_there_is_an_error_and_leaves_no_folder(tmp_path):
    for n in (1, 2):
        ended = train(n, *QUICK, "checkpoint.resume=./nowhere", cwd=tmp_path)
        assert ended.codes == [2] * n
        assert ended.all_err.count("checkpoint.resume=") == 1
        assert "does not exist" in ended.all_err
        assert os.listdir(tmp_path) == []


@pytest.fixture
def read_only(tmp_path):
    place = tmp_path / "ro"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as e:
        pytest.skip(f"mount: {e}")
    if done.returncode:
        pytest.skip(f"no mount permitted here: {done.stderr}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_place_that_cannot_be_written_is_said_before_anything_heavy(tmp_path, read_only):
    for given, n in ((f"run.dir={read_only}/out", 2), (f"run.root={read_only}", 1)):
        ended = train(n, *QUICK, given, "model.name=nope", cwd=tmp_path)
        assert ended.codes == [2] * n
        assert ended.all_err.count("error:") == 1
        assert str(read_only) in ended.all_err and given.split("=")[0] in ended.all_err
    good = train(1, *QUICK, f"run.root={tmp_path}/elsewhere", cwd=read_only)
    assert good.codes == [0], good.all_err
    (tmp_path / "file").write_text("")
    ended = train(1, *QUICK, "run.dir=file", cwd=tmp_path)
    assert ended.codes == [2] and "is not a folder" in ended.all_err


def test_ranks_that_were_given_other_arguments_are_refused(tmp_path):
    ended = train(2, *QUICK, cwd=tmp_path, before=other_arguments)
    assert ended.codes == [2, 2]
    assert ended.all_err.count("not the same everywhere") == 1, ended.all_err
    assert os.listdir(tmp_path) == []


def other_arguments(rank: int) -> None:
    """Rank 1 typed another learning rate."""
    import train as entry

    main = entry.main
    entry.main = lambda argv: main([*argv, f"optimizer.lr={1 + rank}"])


def test_the_tree_is_not_written_to(tmp_path):
    ended = train(1, *QUICK, cwd=tmp_path)
    assert ended.codes == [0]
    assert not (ROOT / "outputs" / ended.folder.name).exists()
