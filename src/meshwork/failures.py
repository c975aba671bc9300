"""When a rank fails or stands still: told once, by one rank, and the others leave soon."""

import faulthandler
import logging
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshwork.config import ConfigError, Failure

if TYPE_CHECKING:
    from meshwork.distributed import World

log = logging.getLogger("meshwork")
log.addHandler(logging.NullHandler())  # before the run folder is known nothing is kept


def report(world: "World", error: BaseException, **facts: Any) -> int:
    """Put a failure on record: told once, by the rank that failed first; returns the exit code.

    The sentence or traceback goes to this rank's log, and from the first failing rank to stderr, to
    failure.txt and status.json of the run folder. Rank 0 gets a moment to close its loggers.
    """
    text, code = _told(error)
    log.error("rank %d: %s", world.ranks.rank, text)
    first = _claim(world)
    if first:
        rank = world.ranks.rank
        place = f"rank {rank} on {socket.gethostname()}: " if world.attempt is not None else ""
        print(f"{place}{text}", file=sys.stderr, flush=True)
        if world.run is not None:
            with suppress(OSError):  # a full disk is told all the same
                (world.run.path / "failure.txt").write_text(f"{place}{text}\n")
                last = text.splitlines()[-1]
                world.run.status("failed", failure=last, failed_rank=rank, **facts)
    _close(world, code)
    if first and world.attempt is not None and not world.is_main:
        with suppress(Exception):
            world.attempt.wait(["closed"], timedelta(seconds=10))
    _wait_for_the_others(world)
    return code


def _told(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, (ConfigError, Failure)):
        lines = "\n".join(f"error: {line}" for line in str(error).splitlines())
        return lines, 2 if isinstance(error, ConfigError) else 1
    return describe(error), 1


def _claim(world: "World") -> bool:
    """Whether this rank is the first to fail."""
    if world.attempt is None:
        return True
    try:
        name = str(world.ranks.rank)
        return world.attempt.compare_set("failure", "", name).decode() == name
    except Exception:  # the store went with the rank that held it: its own report is on its way
        return world.is_main


def _close(world: "World", code: int) -> None:
    """Close this rank's loggers; the first failing rank waits until rank 0 has."""
    for close in world.at_exit:
        try:
            close(code)
        except Exception:
            log.exception("rank %d: closing", world.ranks.rank)
    if world.is_main and world.attempt is not None:
        with suppress(Exception):
            world.attempt.set("closed", "")


def _wait_for_the_others(world: "World", limit_s: float = 5.0) -> None:
    """Rank 0, which holds the store unless torchrun does, leaves last: none misses the failure."""
    if world.attempt is None:
        return
    with suppress(Exception):
        left, end = world.attempt.add("left", 1), time.monotonic() + limit_s
        holds = world.is_main and world.ranks.source != "torchrun"
        while holds and left < world.ranks.world_size and time.monotonic() < end:
            time.sleep(0.1)
            left = world.attempt.add("left", 0)


def watch(
    world: "World",
    done: threading.Event,
    timeout_s: float,
    step_timeout_s: float,
    poll_s: float = 1.0,
) -> None:
    """End this rank soon after another one has failed, and all of them where one stands still.

    done: this rank is leaving by itself. timeout_s: for start, saving and loading; step_timeout_s:
    for everything else.
    """
    store = world.attempt.clone()
    asked = False
    while not done.wait(poll_s):
        try:
            _, since, patient = world.place
            if time.monotonic() - since > (timeout_s if patient else step_timeout_s):
                store.compare_set("stuck", "", str(world.ranks.rank))
            if not asked and store.check(["stuck"]):
                asked = True
                _tell_place(world, store, timeout_s if patient else step_timeout_s)
            found = store.check(["failure"])
            reason = f"rank {store.get('failure').decode()} failed" if found else ""
        except Exception as e:
            reason = f"the store is gone ({str(e).splitlines()[0]})"
        if reason and not done.wait(2.0):
            log.error("rank %d leaves: %s", world.ranks.rank, reason)
            _close(world, 1)
            _wait_for_the_others(world)
            leave(1)


def _tell_place(world: "World", store: dist.Store, limit_s: float, patience_s: float = 5.0) -> None:
    """Every rank says where it stands and keeps its stacks; the rank that called reports it."""
    place, frame = world.place[0], _own_frame(threading.main_thread().ident)
    store.set(f"place/{world.ranks.rank}", f"{place}: {frame}")
    if world.stacks is not None:
        faulthandler.dump_traceback(world.stacks, all_threads=True)
    if store.get("stuck").decode() != str(world.ranks.rank):
        return
    places: dict[str, list[int]] = {}
    end = time.monotonic() + patience_s
    for rank in range(world.ranks.world_size):
        key = f"place/{rank}"
        while not (said := store.check([key])) and time.monotonic() < end:
            time.sleep(0.1)
        text = store.get(key).decode() if said else "does not answer"
        places.setdefault(text, []).append(rank)
    few_first = sorted(places.items(), key=lambda item: len(item[1]))
    shown = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in few_first)
    key = "runtime.timeout_s" if world.place[2] else "runtime.step_timeout_s"
    where = {rank: text for text, ranks in places.items() for rank in ranks}
    report(world, Failure(f"nothing has moved for {limit_s:g} s ({key}). {shown}. Stacks of all "
                          "threads are in logs/rank*.stacks.txt"), where=where)  # fmt: skip
    leave(1)


def _own_frame(thread: int | None) -> str:
    """file:line in function, of the innermost frame of a thread that is no library's."""
    frame = sys._current_frames().get(thread)
    first = frame
    while frame is not None and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or first
    if frame is None:
        return "no frame"
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def _of_library(file: str) -> bool:
    return file.startswith(("<", sys.base_prefix)) or "-packages" in file


def leave(code: int) -> None:
    """End this process at once: after a failure, tearing down process groups may wait for the
    dead."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def describe(error: BaseException) -> str:
    """The traceback of an error as text, without values of local variables."""
    return "".join(traceback.format_exception(error)).rstrip()
