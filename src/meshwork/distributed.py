"""What the ranks share: device, store, process groups, a clean end."""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from meshwork import failures
from meshwork.config import ConfigError, Failure
from meshwork.ranks import NAMES, Ranks
from meshwork.start import Reported

# The last collectives of each rank, written where one of them times out.
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def pick_device(wanted: str, ranks: Ranks) -> torch.device:
    """The device of this process.

    The only visible one where exactly one is (Slurm's --gpus-per-task=1), else the local rank's.
    Raises ConfigError where the machine lacks the kind asked for or has fewer devices than local
    ranks.
    """
    alone = ranks.world_size == 1
    if wanted == "auto":
        mps = alone and torch.backends.mps.is_available()
        wanted = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if wanted == "mps" and not (alone and torch.backends.mps.is_available()):
        raise ConfigError(
            f"runtime.device=mps with WORLD_SIZE={ranks.world_size}: expected an Apple GPU and one "
            "process; use runtime.device=cpu"
        )
    if wanted != "cuda":
        return torch.device(wanted)
    n = torch.cuda.device_count()
    if n == 0:
        raise ConfigError(
            "runtime.device=cuda, but torch sees no GPU: use runtime.device=cpu or auto"
        )
    shared = ranks.source == "torchrun" or n > 1
    local = max(ranks.local_world_size or 1, ranks.local_rank + 1)
    if shared and local > n:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local} processes on this machine, but {n} GPUs are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): start "
            f"--nproc-per-node={n}, or set runtime.device=cpu"
        )
    device = torch.device("cuda", 0 if n == 1 else ranks.local_rank)
    torch.cuda.set_device(device)
    return device


@dataclass
class World:
    """The ranks of a job once they can talk.

    store: shared by all attempts of a job; attempt: the part of it that this attempt uses. control:
    gloo group for decisions; saving: gloo group for checkpoints. All None in one process on its
    own. run: the run folder once it is known. at_exit: called with the exit code when this rank
    leaves. place: what this rank is doing, since when, and whether that may take long.
    stacks: the file that takes the stacks of all threads.
    """

    ranks: Ranks
    device: torch.device
    store: dist.Store | None = None
    attempt: dist.Store | None = None
    control: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None
    hosts: tuple[str, ...] = ()
    run: Any = None
    at_exit: list[Callable[[int], None]] = field(default_factory=list)
    place: tuple[str, float, bool] = ("starting", math.inf, True)
    stacks: Any = None

    @property
    def is_main(self) -> bool:
        return self.ranks.rank == 0

    def beat(self, place: str, patient: bool = False) -> None:
        """Say what comes now; the watch ends the job where it takes too long.

        patient: it may take runtime.timeout_s, as a start does, not only runtime.step_timeout_s.
        """
        self.place = place, time.monotonic(), patient

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, on the CPU, in place."""
        if self.control is not None:
            dist.all_reduce(values, group=self.control)
        return values

    def from_main(self, value: object) -> object:
        """Rank 0's value on every rank; values are plain Python."""
        box = [value]
        if self.control is not None:
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def on_main(self, function: Callable, *args: object) -> Any:
        """What a function called on rank 0 alone returns, or raises for a person to read (OSError,
        ConfigError, Failure), on every rank."""
        answer = None
        if self.is_main:
            try:
                answer = True, function(*args)
            except (OSError, ConfigError, Failure) as e:
                answer = False, e
        good, value = self.from_main(answer)
        if not good:
            raise value
        return value

    def for_saving(self) -> "World":
        """The same ranks, deciding on the group for checkpoints: for a thread that saves."""
        return replace(self, control=self.saving)

    def require_same(self, key: str, value: object) -> None:
        """Raise ConfigError, on all ranks, where a value of the config key differs between them."""
        found = self.to_main(value)
        other = next((i for i, v in enumerate(found) if v != value), None) if found else None
        if found and other is not None:
            difference = f"rank 0 sees {value}, rank {other} on {self.hosts[other]} {found[other]}"
        else:
            difference = None
        if difference := self.from_main(difference):
            raise ConfigError(f"{key} is not the same everywhere: {difference}")

    def to_main(self, value: object) -> list | None:
        """On rank 0 the values of all ranks in order, elsewhere None; values are plain Python."""
        if self.control is None:
            return [value]
        found = [None] * self.ranks.world_size if self.is_main else None
        dist.gather_object(value, found, dst=0, group=self.control)
        return found


def _connect(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """The store that torch's `env://` finds; the five variables are set from `ranks` (Slurm has
    none)."""
    address, port = ranks.master
    values = (ranks.rank, ranks.world_size, ranks.local_rank, address, port)
    os.environ.update({name: str(value) for name, value in zip(NAMES, values, strict=True)})
    try:
        return next(iter(rendezvous("env://", timeout=timeout)))[0]
    except (dist.DistNetworkError, dist.DistStoreError, ValueError, RuntimeError) as e:
        reason = str(e).splitlines()[0]
        taken = "EADDRINUSE" in str(e) or "address already in use" in str(e).lower()
        hint = (
            "another program holds that port: export another MASTER_PORT, or start with "
            "torchrun --standalone, which finds a free one"
            if taken
            else "is rank 0 running, and is the address reachable from here?"
        )
        raise ConfigError(
            f"rank {ranks.rank} on {socket.gethostname()}: no store at MASTER_ADDR={address} "
            f"MASTER_PORT={port} ({reason}): {hint}"
        ) from e


def _fill_nodes(ranks: Ranks, hosts: list[str]) -> Ranks:
    """local_world_size and node_rank from the hosts of all ranks, where nobody exported them."""
    own = hosts[ranks.rank]
    nodes = list(dict.fromkeys(hosts))
    return replace(
        ranks,
        local_world_size=hosts.count(own)
        if ranks.local_world_size is None
        else ranks.local_world_size,
        node_rank=nodes.index(own) if ranks.node_rank is None else ranks.node_rank,
    )


def _refuse_shared_gpu(store: dist.Store, ranks: Ranks, device: torch.device) -> None:
    """Two ranks on one GPU would hang in nccl: each says which it has."""
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    holder = store.compare_set(f"gpu/{own}", "", str(ranks.rank)).decode()
    if holder != str(ranks.rank):
        raise ConfigError(
            f"rank {ranks.rank} and rank {holder} both got GPU {own}: give each its own "
            "(CUDA_VISIBLE_DEVICES), or start fewer processes"
        )


@contextmanager
def start(
    ranks: Ranks, device: torch.device, timeout_s: float, step_timeout_s: float = math.inf
) -> Iterator[World]:
    """Join the other ranks; leave them cleanly, or after the first failure is on record.

    In one process on its own no process group is started. Raises Reported once a failure inside has
    been told; where other ranks wait, the process ends there and then.
    """
    world = World(ranks, device, hosts=(socket.gethostname(),))
    done = threading.Event()
    try:
        if ranks.master is not None:
            _join(world, timedelta(seconds=timeout_s))
            limits = timeout_s, step_timeout_s
            threading.Thread(
                target=failures.watch, args=(world, done, *limits), daemon=True
            ).start()
        yield world
        done.set()
        for close in world.at_exit:
            close(0)
        if ranks.master is not None:
            dist.barrier(group=world.control)
            dist.destroy_process_group()
    except BaseException as error:
        done.set()
        code = failures.report(world, error)
        if ranks.master is not None and dist.is_initialized():
            failures.leave(code)
        raise Reported(code) from error


def _join(world: World, timeout: timedelta) -> None:
    """Fill in store and groups."""
    ranks, device = world.ranks, world.device
    world.store = _connect(ranks, timeout)
    number = ranks.restarts if ranks.reused_store else 0
    world.attempt = dist.PrefixStore(f"attempt-{number}", world.store)
    if device.type == "cuda":
        _refuse_shared_gpu(world.attempt, ranks, device)
        for name, value in FLIGHT_RECORDER.items():
            os.environ.setdefault(name, value)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=world.attempt,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    world.control, world.saving = (
        dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)
    )
    hosts: list[str] = [""] * ranks.world_size
    dist.all_gather_object(hosts, socket.gethostname(), group=world.control)
    world.hosts, world.ranks = tuple(hosts), _fill_nodes(ranks, hosts)
