"""Start ranks cheaply: processes forked from a server that has torch and timm loaded.

`run_ranks` calls a function on every rank, `train` runs train.py's main. Both have a wall-clock
limit, and reaching it is a failure of its own: Hang.
"""

import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = [
    "torch",
    "timm",
    "hydra.main",
    "sklearn.datasets",
    "torch.distributed.checkpoint",
    "meshwork.trainer",
    "meshwork.modes",
]
# Found by the server and by every process that it forks, also where nothing is installed.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")])
os.environ.setdefault("OMP_NUM_THREADS", "1")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class Hang(AssertionError):
    """Ranks that did not end in time."""


@dataclass
class Ended:
    """How a start of train.py ended: exit codes and output of each rank, seconds it took."""

    codes: list[int]
    out: list[str]
    err: list[str]
    seconds: float

    @property
    def all_out(self) -> str:
        return "\n".join(self.out)

    @property
    def all_err(self) -> str:
        return "\n".join(self.err)

    @property
    def folder(self) -> Path:
        """The run folder that the start table names."""
        return Path(re.search(r"^folder +(\S.*)$", self.all_out, re.M)[1])

    def lines(self, *names: str) -> list[dict]:
        """Lines of metrics.jsonl that hold all these metrics."""
        text = (self.folder / "metrics.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        return [line for line in found if all(n in line for n in names)]

    def result(self) -> dict:
        return json.loads((self.folder / "result.json").read_text())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a person exports by hand for a rank."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    return {**{k: str(v) for k, v in values.items()}, "MASTER_ADDR": "127.0.0.1"}


def run_ranks(n: int, function: Callable, *args: Any, timeout_s: float = 60) -> list[Any]:
    """function(rank, *args) on n ranks whose environment is exported; returns their results.

    Raises AssertionError with the tracebacks of ranks that failed, Hang where time ran out.
    """
    port = free_port()
    pipes, processes = [], []
    for rank in range(n):
        receive, send = _context.Pipe(duplex=False)
        env = rank_env(rank, n, port)
        process = _context.Process(target=_call, args=(send, env, function, rank, args))
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    _wait(processes, timeout_s)
    results = [_received(pipe) for pipe in pipes]
    failed = [f"rank {r}:\n{text}" for r, (good, text) in enumerate(results) if not good]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def _received(pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll() else (False, "no result")
    except EOFError:  # left by os._exit, as ranks do after a failure: its report is on stderr
        return False, "ended without a result"


def train(
    n: int,
    *overrides: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout_s: float = 90,
    before: Callable | None = None,
) -> Ended:
    """train.py with these arguments, in one process (n=1) or on n ranks with exported variables.

    cwd: where the command is typed. before: called with the rank in each process first, to plant a
    fault.
    """
    return Started(n, *overrides, cwd=cwd, env=env, before=before).ended(timeout_s)


class Started:
    """Ranks of train.py that a test can look at, signal and kill, and then wait for."""

    def __init__(
        self,
        n: int,
        *overrides: str,
        cwd: Path,
        env: dict[str, str] | None = None,
        before: Callable | None = None,
    ):
        port, self.began, self.folder = free_port(), time.monotonic(), Path(tempfile.mkdtemp())
        self.processes, self.files = [], []
        for rank in range(n):
            own = {**(rank_env(rank, n, port) if n > 1 else {}), **(env or {})}
            files = [self.folder / f"rank{rank}.{kind}" for kind in ("out", "err")]
            given = (list(overrides), str(cwd), own, [str(p) for p in files], before, rank)
            process = _context.Process(target=_train, args=given)
            process.start()
            self.processes.append(process)
            self.files.append(files)

    def told(self) -> str:
        """What all ranks have printed so far."""
        return "\n".join(p.read_text() for pair in self.files for p in pair if p.exists())

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Wait until some rank has printed a text."""
        end = time.monotonic() + timeout_s
        while text not in (told := self.told()):
            assert any(p.is_alive() for p in self.processes), f"ended without {text!r}\n{told}"
            if time.monotonic() > end:
                self.kill()
                raise Hang(f"{text!r} was not printed within {timeout_s} s\n{told[-3000:]}")
            time.sleep(0.02)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to these ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)

    def kill(self) -> None:
        """SIGKILL to all, and no wait for them but this."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def ended(self, timeout_s: float = 90) -> Ended:
        _wait(self.processes, timeout_s, self.told)
        texts = [[p.read_text() for p in pair] for pair in self.files]
        shutil.rmtree(self.folder)
        seconds = time.monotonic() - self.began
        codes = [p.exitcode for p in self.processes]
        return Ended(codes, [t[0] for t in texts], [t[1] for t in texts], seconds)


def _wait(processes: list, timeout_s: float, told: Callable[[], str] = str) -> None:
    end = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    stuck = [i for i, p in enumerate(processes) if p.is_alive()]
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    if stuck:
        raise Hang(f"ranks {stuck} did not end within {timeout_s} s\n{told()[-3000:]}")


def _clean_environment(env: dict[str, str]) -> None:
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC", "SLURM_", "PMI_", "WANDB_")) or name in rank_env(
            0, 1, 0
        ):
            del os.environ[name]
    os.environ.update(env)
    # As in a process that a person starts; a forkserver of its own would take seconds a loader.
    multiprocessing.set_start_method("fork", force=True)


def _call(pipe: Any, env: dict, function: Callable, rank: int, args: tuple) -> None:
    import torch

    _clean_environment(env)
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(rank, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _train(overrides: list, cwd: str, env: dict, files: list, before: Callable, rank: int) -> None:
    import torch

    for path, number in zip(files, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    _clean_environment(env)
    os.chdir(cwd)
    torch.set_num_threads(1)
    if before is not None:
        before(rank)
    sys.argv = ["train.py", *overrides]
    import train

    code = train.main(overrides)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
