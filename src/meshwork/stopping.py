"""Asked to stop: by a signal to any rank, or by a file `stop` in the run folder."""

import signal
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from meshwork.distributed import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
AGAIN_S = 1.0  # Ctrl-C reaches a process twice, from the terminal and from torchrun
LOOK_S = 1.0  # between two looks at the file


class Stop:
    """Whether the run is to save and leave, the same answer on all ranks at the same step.

    A second Ctrl-C ends the process at once. file: the run folder's `stop`; rank 0 looks for it and
    removes it. reason: what asked this rank, None where it was another one.
    """

    def __init__(self, world: World, folder: Path):
        self.world, self.file = world, folder / "stop"
        self.reason: str | None = None
        self.interrupted = 0.0
        self.looked = time.monotonic()
        self.pending: tuple | None = None
        self.decided = False
        self.before: dict = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._asked) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self.interrupted and now - self.interrupted > AGAIN_S:
                raise KeyboardInterrupt
            self.interrupted = self.interrupted or now
        self.reason = self.reason or signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether all ranks stop here; all of them ask once a step.

        The answer is that of one call before: its small reduction runs beside the step.
        """
        if self.decided:
            return True
        self._look()
        if self.world.control is None:
            self.decided = self.reason is not None
            return self.decided
        if self.pending is not None:
            work, asked = self.pending
            work.wait()
            self.decided = bool(asked.item())
        flag = torch.tensor([self.reason is not None], dtype=torch.int32)
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        self.pending = work, flag
        return self.decided

    def node_stays(self) -> bool:
        """Whether only other nodes were asked, each as a whole: they leave, and torchrun starts
        this one's ranks again with those that stay. All ranks ask after they have stopped."""
        node = self.world.ranks.node_rank
        told = self.world.to_main((node, self.reason is not None))
        nodes = {n: [asked for m, asked in told if m == n] for n, _ in told} if told else None
        nodes = self.world.from_main(nodes)
        leaving = [n for n, asked in nodes.items() if all(asked)]
        untouched = [n for n, asked in nodes.items() if not any(asked)]
        return node in untouched and len(leaving) + len(untouched) == len(nodes) and bool(leaving)

    def _look(self) -> None:
        now = time.monotonic()
        if self.world.is_main and now - self.looked > LOOK_S:
            self.looked = now
            if self.file.exists():
                self.file.unlink(missing_ok=True)
                self.reason = self.reason or f"the file {self.file.name}"
