"""train.py as a command: help, printing the config, sweeps in one process, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import faults
from ranks import ROOT, train

QUICK = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=16")
QUICK += ("data.val_samples=8", "trainer.global_batch_size=8", "trainer.max_steps=2")


def typed(*argv: str, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_help_takes_less_than_two_seconds_and_starts_nothing(tmp_path):
    began = time.monotonic()
    ended = typed("--help", cwd=tmp_path)
    assert time.monotonic() - began < 2
    assert ended.returncode == 0
    assert "trainer.global_batch_size" in ended.stdout and "parallel=ddp" in ended.stdout
    assert os.listdir(tmp_path) == []


def test_cfg_prints_the_resolved_config_and_starts_nothing(tmp_path):
    ended = typed("--cfg", "job", "--resolve", "seed=7", cwd=tmp_path)
    assert ended.returncode == 0 and "seed: 7" in ended.stdout
    assert os.listdir(tmp_path) == []


def test_the_shell_completion_is_printed(tmp_path):
    ended = typed("-sc", "install=bash", cwd=tmp_path)
    assert ended.returncode == 0 and "complete" in ended.stdout


def test_a_list_of_values_without_a_sweep_is_said_once(tmp_path):
    ended = train(2, *QUICK, "optimizer.lr=0.1,0.01", cwd=tmp_path)
    assert ended.codes == [2, 2]
    assert ended.all_err.count("optimizer.lr=0.1,0.01") == 1 and "-m" in ended.all_err


def test_a_sweep_inside_ranks_is_refused_once_with_the_command_to_type(tmp_path):
    ended = train(2, *QUICK, "optimizer.lr=0.1,0.01", "--multirun", cwd=tmp_path)
    assert ended.codes == [2, 2]
    assert ended.all_err.count("python train.py --multirun") == 1
    assert os.listdir(tmp_path) == []


def test_a_sweep_in_one_process_goes_on_past_a_job_that_fails(tmp_path):
    given = [g for g in QUICK if not g.startswith("logger")]
    ended = train(
        1,
        "-m",
        *given,
        "task._target_=faults.Failing",
        "task.args.on_rank=0",
        "task.args.at_step=9,1,8",
        "task.args.how=raise",
        "logger.mode=offline",
        cwd=tmp_path,
        before=faults.allow,
    )
    assert ended.codes == [1], ended.all_err
    (sweep,) = (tmp_path / "multirun").iterdir()
    states = [json.loads((sweep / str(i) / "status.json").read_text())["state"] for i in range(3)]
    assert states == ["finished", "failed", "finished"]
    assert "planted on purpose" in (sweep / "1" / "failure.txt").read_text()
    assert "planted on purpose" in (sweep / "1" / "logs" / "rank0.log").read_text()
    ids = set()
    for i in range(3):
        (offline,) = (sweep / str(i) / "wandb").glob("offline-run-*")
        ids.add(offline.name.rsplit("-", 1)[-1])
    assert len(ids) == 3


def test_an_exit_inside_a_job_does_not_end_the_sweep(tmp_path):
    given = ("task._target_=faults.Failing", "task.args.on_rank=0", "task.args.how=exit")
    ended = train(
        1, "-m", *QUICK, *given, "task.args.at_step=1,9", cwd=tmp_path, before=faults.allow
    )
    assert ended.codes[0] not in (0, None)
    (sweep,) = (tmp_path / "multirun").iterdir()
    states = [json.loads((sweep / str(i) / "status.json").read_text())["state"] for i in range(2)]
    assert states == ["failed", "finished"]


def test_ctrl_c_saves_and_stops_with_75_and_leaves_no_process_behind(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "logger=none", "trainer.max_epochs=500"]
    command += ["data.workers=2", "checkpoint.every_n_epochs=null", "run.dir=run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background jobs, and so what they start, ignore Ctrl-C.
    heeds = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes, **heeds)
    for line in process.stdout:
        if line.startswith("step 10/"):
            break
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 75, err
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGINT")
    assert (tmp_path / "run" / "checkpoints" / f"step_{status['step']}" / "state.json").exists()
    assert "Traceback" not in err, err
    time.sleep(0.5)
    left = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True)
    assert left.stdout == ""
