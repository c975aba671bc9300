"""A rank that fails ends the whole job soon, told once, with its traceback in the run folder."""

import json
import subprocess
import sys

import faults
import pytest
from ranks import ROOT, train

QUICK = ("logger=none", "data=synthetic", "data.workers=0", "data.num_samples=64")
QUICK += ("data.val_samples=16", "trainer.global_batch_size=8", "trainer.max_epochs=4")
FAILING = ("task._target_=faults.Failing",)


def break_save(rank: int) -> None:
    """Rank 1 raises inside the save."""
    from meshwork import checkpoint

    def fails(*_: object) -> None:
        raise OSError("disk on fire")

    if rank == 1:
        checkpoint._tensors = fails


def break_logger(rank: int) -> None:
    """The log of metrics raises at its second line."""
    from meshwork.logger import JsonlLogger

    log = JsonlLogger.log

    def fails(self: JsonlLogger, metrics: dict, step: int) -> None:
        if step > 1:
            raise OSError("disk on fire")
        log(self, metrics, step)

    JsonlLogger.log = fails


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_failing_rank_is_told_once_with_its_traceback(tmp_path, rank):
    ended = train(
        2, *QUICK, *FAILING, f"task.args.on_rank={rank}", cwd=tmp_path, before=faults.allow
    )
    assert all(code not in (0, None) for code in ended.codes), ended.codes
    assert ended.all_err.count("ValueError: planted on purpose") == 1, ended.all_err
    assert ended.all_err.count("Traceback") == 1
    assert f"rank {rank} on " in ended.err[rank]
    assert ended.seconds < 40
    assert "planted on purpose" in (ended.folder / "failure.txt").read_text()
    status = json.loads((ended.folder / "status.json").read_text())
    assert (status["state"], status["failed_rank"]) == ("failed", rank)
    assert "planted on purpose" in (ended.folder / "logs" / f"rank{rank}.log").read_text()


def test_a_failure_inside_the_save_ends_the_job_and_leaves_no_half_checkpoint(tmp_path):
    ended = train(2, *QUICK, "checkpoint.every_n_steps=2", cwd=tmp_path, before=break_save)
    assert all(code not in (0, None) for code in ended.codes), ended.codes
    assert ended.all_err.count("OSError: disk on fire") == 1, ended.all_err
    assert not list((ended.folder / "checkpoints").glob("step_*"))


def test_a_logger_that_fails_never_ends_training(tmp_path):
    ended = train(2, *QUICK, "trainer.max_steps=4", cwd=tmp_path, before=break_logger)
    assert ended.codes == [0, 0], ended.all_err
    assert ended.all_out.count("disk on fire") == 1
    assert ended.result()["step"] == 4


def test_a_killed_rank_ends_its_peers(tmp_path):
    given = (*QUICK, *FAILING, "task.args.how=kill", "runtime.timeout_s=60")
    ended = train(3, *given, cwd=tmp_path, before=faults.allow)
    assert ended.codes[1] == -9
    assert ended.codes[0] not in (0, None) and ended.codes[2] not in (0, None)
    assert ended.seconds < 40
    assert "peer" in ended.all_err, ended.all_err
    assert json.loads((ended.folder / "status.json").read_text())["state"] == "failed"


def test_lack_of_memory_names_the_next_smaller_micro_batch(tmp_path):
    ended = train(
        1, *QUICK, *FAILING, "task.args.how=memory", "task.args.on_rank=0", cwd=tmp_path,
        before=faults.allow,
    )  # fmt: skip
    assert ended.codes == [2]
    assert "trainer.micro_batch_size=4" in ended.all_err
    assert "Traceback" not in ended.all_err


def test_under_torchrun_the_first_failure_is_told_once_and_no_process_is_left(tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import faults, train\nfaults.allow(0)\nsys.exit(train.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script), *QUICK, *FAILING]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.count("ValueError: planted on purpose") == 1, ended.stderr
    assert "rank 1 on " in ended.stderr
    left = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True)
    assert left.stdout == ""
