"""Asked to stop, all ranks agree on the step, save it, and leave; a rank that stands is named."""

import json
import os
import signal
import time
from pathlib import Path

import faults
import pytest
from ranks import Started, train

from meshwork.checkpoint_files import complete, problem, read_state

QUICK = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=64")
QUICK += ("data.val_samples=64", "trainer.global_batch_size=8", "trainer.max_epochs=200")
QUICK += ("checkpoint.every_n_epochs=null", "trainer.val_every_n_epochs=null", "run.dir=run")
SLOW = ("task._target_=faults.Slow",)


def status_of(folder: Path) -> dict:
    return json.loads((folder / "run" / "status.json").read_text())


def check_stopped(started: Started, folder: Path, by: str, code: int = 75) -> dict:
    """All ranks have left soon, with a good checkpoint of the step they agreed on."""
    asked = time.monotonic()
    ended = started.ended(60)
    assert ended.codes == [code] * len(ended.codes), ended.all_err
    assert time.monotonic() - asked < 25
    status = status_of(folder)
    assert (status["state"], status["reason"]) == ("stopped", by)
    newest = complete(folder / "run")[-1]
    assert newest.name == f"step_{status['step']}" and problem(newest) is None
    assert f"asked by {by}" in ended.all_out or by == "another rank"
    return status


@pytest.mark.parametrize(
    ("name", "rank", "layout"),
    [("SIGTERM", 0, "ddp"), ("SIGUSR1", 1, "fsdp"), ("SIGUSR2", 1, "pipeline")],
)
def test_a_signal_to_one_rank_stops_all_at_one_step(
    name: str, rank: int, layout: str, tmp_path: Path
) -> None:
    started = Started(2, *QUICK, f"parallel={layout}", cwd=tmp_path)
    started.wait_for("step 10/")
    started.signal(signal.Signals[name], rank)
    status = check_stopped(started, tmp_path, name if rank == 0 else "another rank")
    assert status["step"] >= 10


def test_a_second_signal_is_safe_and_the_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    given = (
        *QUICK,
        "trainer.max_epochs=5",
        "trainer.log_every_n_steps=1",
        "trainer.precision=fp64",
    )
    whole = train(2, *given, "run.dir=whole", cwd=tmp_path)
    started = Started(2, *given, *SLOW, "task.args.wait_s=0.1", cwd=tmp_path, before=faults.allow)
    started.wait_for("step 5/")
    for _ in range(5):
        started.signal(signal.SIGTERM)
        time.sleep(0.05)
    check_stopped(started, tmp_path, "SIGTERM")
    then = train(2, *given, cwd=tmp_path)
    assert then.codes == [0, 0], then.all_err
    lines, wanted = then.lines("train/loss"), whole.lines("train/loss")
    assert [x["step"] for x in lines] == [x["step"] for x in wanted] == list(range(1, 41))
    assert [x["train/loss"] for x in lines] == [x["train/loss"] for x in wanted]


def test_the_stop_file_stops_all_ranks_and_is_removed(tmp_path: Path) -> None:
    started = Started(2, *QUICK, cwd=tmp_path)
    started.wait_for("step 10/")
    file = tmp_path / "run" / "stop"
    file.touch()
    check_stopped(started, tmp_path, "the file stop")
    assert not file.exists()


def test_a_validation_is_broken_off_and_made_up_for(tmp_path: Path) -> None:
    """The validation of step 8 is due again before step 9."""
    given = [o for o in QUICK if "val_every" not in o] + ["trainer.max_epochs=2"]
    slow = (*SLOW, "task.args.training=false", "task.args.wait_s=2")
    started = Started(2, *given, *slow, cwd=tmp_path, before=faults.allow)
    started.wait_for("step 1/16")
    end = time.monotonic() + 60
    while "val, batch" not in place_of(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    started.signal(signal.SIGTERM)
    status = check_stopped(started, tmp_path, "SIGTERM")
    assert status["step"] == 8
    assert read_state(tmp_path / "run" / "checkpoints" / "step_8")["unvalidated"] is True
    then = train(2, *given, cwd=tmp_path)
    assert then.codes == [0, 0], then.all_err
    assert [line["step"] for line in then.lines("val/loss")] == [8, 16]


def place_of(folder: Path) -> str:
    """Asks rank 0 for its stacks until it stands in a validation."""
    log = folder / "run" / "logs" / "rank0.stacks.txt"
    if not log.exists():
        return ""
    pid = status_of(folder).get("pid")
    os.kill(pid, signal.SIGQUIT)
    time.sleep(0.2)
    return "val, batch" if "in evaluate" in log.read_text() else ""


def test_a_signal_amid_a_save_waits_for_it(tmp_path: Path) -> None:
    given = ("checkpoint.every_n_steps=1", "checkpoint.keep=3")
    started = Started(2, *QUICK, *given, cwd=tmp_path, before=slow_save)
    started.wait_for("step 1/")
    time.sleep(0.7)
    started.signal(signal.SIGTERM, 1)
    check_stopped(started, tmp_path, "another rank")
    assert all(problem(path) is None for path in complete(tmp_path / "run"))


def slow_save(rank: int) -> None:
    from meshwork import tensor_files

    write = tensor_files.write_from

    def slow(*given: object) -> object:
        time.sleep(0.5)
        return write(*given)

    tensor_files.write_from = slow


def test_ctrl_c_twice_stops_at_once(tmp_path: Path) -> None:
    given = (*QUICK, *SLOW, "task.args.wait_s=60")
    started = Started(1, *given, cwd=tmp_path, before=faults.allow)
    started.wait_for("logging ")
    time.sleep(2)
    started.signal(signal.SIGINT)
    time.sleep(1.5)
    assert started.processes[0].is_alive()
    started.signal(signal.SIGINT)
    ended = started.ended(15)
    assert ended.codes == [130] and "Traceback" not in ended.all_err
    assert not complete(tmp_path / "run")


# ---- a rank that stands --------------------------------------------------------------------------


def test_a_rank_that_stands_still_is_named_with_its_place(tmp_path: Path) -> None:
    given = ("task.args.on_rank=1", "task.args.wait_s=100", "runtime.step_timeout_s=6")
    given += ("task.args.quick=1",)  # the first step may take long
    ended = train(2, *QUICK, *SLOW, *given, cwd=tmp_path, before=faults.allow, timeout_s=60)
    assert 0 not in ended.codes
    said = [line for line in ended.all_err.splitlines() if "nothing has moved for 6 s" in line]
    assert len(said) == 1, ended.all_err
    assert "runtime.step_timeout_s" in said[0] and "rank 1: step 2: faults.py:" in said[0]
    status = status_of(tmp_path)
    assert status["state"] == "failed" and "faults.py" in status["where"]["1"]
    assert status["where"]["0"].startswith("step 2: engine.py:")
    for rank in (0, 1):
        stacks = (tmp_path / "run" / "logs" / f"rank{rank}.stacks.txt").read_text()
        assert "most recent call first" in stacks


def test_sigquit_writes_the_stacks_of_a_rank_and_it_goes_on(tmp_path: Path) -> None:
    started = Started(2, *QUICK, "trainer.max_epochs=40", cwd=tmp_path)
    started.wait_for("step 10/")
    started.signal(signal.SIGQUIT, 1)
    assert started.ended().codes == [0, 0]
    logs = tmp_path / "run" / "logs"
    assert "in fit" in (logs / "rank1.stacks.txt").read_text()
    assert (logs / "rank0.stacks.txt").read_text() == ""


def test_a_folder_that_a_live_run_writes_is_refused(tmp_path: Path) -> None:
    started = Started(1, *QUICK, cwd=tmp_path)
    started.wait_for("step 1/")
    second = train(1, *QUICK, cwd=tmp_path, before=impatient)
    assert second.codes == [2]
    assert f"{tmp_path / 'run'} is written by another live run (pid " in second.all_err
    started.signal(signal.SIGTERM)
    check_stopped(started, tmp_path, "SIGTERM")
    assert status_of(tmp_path)["attempt"] == 1


def impatient(rank: int) -> None:
    from meshwork import rundir

    rundir.LOCK_S = 0.5
