"""Where ranks come from: torchrun, two nodes, exported variables, and what stands in their way."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ranks import ROOT, free_port, train

QUICK = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=16")
QUICK += ("data.val_samples=8", "trainer.global_batch_size=8", "trainer.max_steps=2")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = str(ROOT / "train.py")


def clean() -> dict[str, str]:
    """This environment without ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}


def begin(cwd: Path, *command: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*TORCHRUN, *command], cwd=cwd, env=clean(), **pipes)


def end(process: subprocess.Popen, timeout_s: float = 90) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def runs(cwd: Path) -> list[Path]:
    return [p for p in (cwd / "outputs").iterdir() if not p.is_symlink()]


def test_a_config_error_under_torchrun_is_one_sentence_and_leaves_no_folder(tmp_path):
    process = begin(tmp_path, "--standalone", "--nproc-per-node=2", SCRIPT, "optimzer.lr=0.1")
    code, out, err = end(process, 60)
    assert code == 1
    assert (out + err).count("no key optimzer.lr") == 1
    assert 'Traceback (most recent call last):\n  File "' + SCRIPT not in err
    assert os.listdir(tmp_path) == []


def test_two_torchruns_at_once_have_a_folder_each(tmp_path):
    started = [
        begin(tmp_path, "--standalone", "--nproc-per-node=1", SCRIPT, *QUICK) for _ in range(2)
    ]
    ended = [end(p) for p in started]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert len(runs(tmp_path)) == 2
    assert all("from torchrun" in out or "1, torchrun" in out for _, out, _ in ended)


def test_two_nodes_are_one_run_in_one_folder(tmp_path):
    address = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    first = begin(tmp_path, *address, "--node-rank=1", "--nproc-per-node=1", SCRIPT, *QUICK)
    time.sleep(2)
    second = begin(tmp_path, *address, "--node-rank=0", "--nproc-per-node=1", SCRIPT, *QUICK)
    (code_0, out_0, err_0), (code_1, out_1, err_1) = end(second), end(first)
    assert (code_0, code_1) == (0, 0), err_0 + err_1
    (folder,) = runs(tmp_path)
    assert "2 from torchrun" in out_0
    assert out_1.strip() == ""
    assert sorted(p.name for p in (folder / "logs").glob("*.log")) == ["rank0.log", "rank1.log"]
    assert json.loads((folder / "result.json").read_text())["step"] == 2


def test_a_killed_worker_comes_back_to_its_run(tmp_path):
    given = (*QUICK, "data._target_=faults.slow_synthetic", "trainer.max_steps=60")
    given += ("checkpoint.every_n_steps=4", "data.args.wait_s=0.01")
    script = tmp_path / "entry.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import faults, train\nfaults.allow(0)\nsys.exit(train.main(sys.argv[1:]))\n"
    )
    launch = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", str(script))
    process = begin(tmp_path, *launch, *given)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("outputs/2*/checkpoints/step_*")):
        assert time.monotonic() < deadline and process.poll() is None, end(process)
        time.sleep(0.05)
    (folder,) = runs(tmp_path)
    first_config = (folder / "config.yaml").stat().st_mtime_ns
    os.kill(json.loads((folder / "status.json").read_text())["pid"], signal.SIGKILL)
    code, out, err = end(process)
    assert code == 0, out + err
    assert runs(tmp_path) == [folder]
    assert (folder / "config.yaml").stat().st_mtime_ns == first_config
    assert (folder / "config.attempt_2.yaml").exists()
    assert re.search(r"loaded .*/step_\d+: step \d+", out)
    result = json.loads((folder / "result.json").read_text())
    assert (result["state"], result["step"], result["attempts"]) == ("finished", 60, 2)


def test_torchrun_starts_the_module_as_well(tmp_path):
    launch = ("--standalone", "--nproc-per-node=1", "-m", "train", *QUICK)
    code, out, err = end(begin(ROOT, *launch, f"run.root={tmp_path}"))
    assert code == 0, err
    assert "finished" in out


def test_a_port_that_is_taken_is_said_in_seconds(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = train(1, *QUICK, cwd=tmp_path, env=env)
    assert ended.codes == [2]
    assert f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}" in ended.all_err
    assert "export another MASTER_PORT" in ended.all_err
    assert "Traceback" not in ended.all_err
    assert ended.seconds < 30 and os.listdir(tmp_path) == []


def test_half_a_set_of_variables_names_all_of_them(tmp_path):
    for env, wrong in (
        ({"RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE is missing"),
        ({"RANK": "a"}, "RANK is no number"),
        (
            {
                "RANK": "2",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29611",
            },
            "0 <= RANK < WORLD_SIZE does not hold",
        ),
    ):
        ended = train(1, *QUICK, cwd=tmp_path, env=env)
        assert ended.codes == [2] and wrong in ended.all_err
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            assert name in ended.all_err
        assert os.listdir(tmp_path) == []


def test_variables_of_a_job_or_of_mpi_alone_start_no_ranks(tmp_path):
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for env in (job, {"PMI_SIZE": "4", "PMI_RANK": "0"}):
        ended = train(1, *QUICK, cwd=tmp_path, env=env)
        assert ended.codes == [0], ended.all_err
        assert "1, one process" in ended.all_out
    ended = train(2, *QUICK, cwd=tmp_path, env=job)
    assert "2 from hand-exported variables" in ended.all_out


def test_a_slurm_step_is_a_job_of_its_tasks(tmp_path):
    def step(rank: int) -> dict[str, str]:
        return {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}

    shared = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    started = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *QUICK],
            cwd=tmp_path,
            env=clean() | shared | step(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [end(p) for p in started]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "2 from a Slurm step" in ended[0][1]
    assert len(runs(tmp_path)) == 1
