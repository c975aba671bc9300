"""Machines for tests: torchrun agents, each in a network namespace of its own where root allows."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ranks import ROOT, Hang, free_port


def namespaces_work() -> bool:
    """Whether this user may make network namespaces and the tool for it is there."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"mwtry{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


def children_of(pid: int, deep: bool = True) -> list[int]:
    """The processes below one, or only those it has started itself."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        below = [p for p, parent in parents.items() if parent == one]
        found += below
        todo += below if deep else []
    return found


class Network:
    """Up to nine nodes that see each other: addresses 10.77.0.1 to 9, or all 127.0.0.1.

    The first node holds the store of the rendezvous: it must not be lost.
    """

    def __init__(self, folder: Path, separate: bool):
        self.folder, self.separate, self.nodes = folder, separate, []
        self.port, self.tag = free_port(), f"mw{os.getpid() % 10000}"
        if separate:
            self._ip("link", "add", self.bridge, "type", "bridge")
            self._ip("link", "set", self.bridge, "up")

    @property
    def bridge(self) -> str:
        return f"{self.tag}b"

    def _ip(self, *args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True)

    def _join(self, n: int) -> None:
        name, outer, inner = f"{self.tag}n{n}", f"{self.tag}o{n}", f"{self.tag}i{n}"
        self._ip("netns", "add", name)
        self._ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        self._ip("link", "set", outer, "master", self.bridge, "up")
        self._ip("link", "set", inner, "netns", name)
        for args in (("lo", "up"), (inner, "up")):
            self._ip("-n", name, "link", "set", *args)
        self._ip("-n", name, "addr", "add", f"10.77.0.{n}/24", "dev", inner)

    def node(self, processes: int, *overrides: str) -> "Node":
        """A new node with so many ranks, and an agent that joins the job."""
        n = len(self.nodes) + 1
        address, prefix = "127.0.0.1", []
        if self.separate:
            self._join(n)
            address, prefix = f"10.77.0.{n}", ["ip", "netns", "exec", f"{self.tag}n{n}"]
        host = "10.77.0.1" if self.separate else "127.0.0.1"
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4"]
        command += [f"--nproc-per-node={processes}", "--max-restarts=9", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint={host}:{self.port}", f"--rdzv-id={self.tag}"]
        conf = f"is_host={n == 1},last_call_timeout=2,keep_alive_interval=1,join_timeout=60"
        command += [f"--rdzv-conf={conf}"]
        command += [f"--local-addr={address}", str(ROOT / "train.py"), *overrides]
        found = Node(command, self.folder, n, f"{self.tag}i{n}" if self.separate else "lo")
        self.nodes.append(found)
        return found

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        for n in range(1, len(self.nodes) + 1) if self.separate else ():
            subprocess.run(["ip", "netns", "del", f"{self.tag}n{n}"], capture_output=True)
        if self.separate:
            subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


class Node:
    """A torchrun agent and its ranks."""

    def __init__(self, command: list[str], folder: Path, n: int, interface: str):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "WANDB"))}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        env["GLOO_SOCKET_IFNAME"] = interface  # names of these hosts lead nowhere
        self.log = folder / f"node{n}.log"
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=env
            )

    def kill(self) -> None:
        """As if the power went: SIGKILL to the agent and all below it."""
        for pid in [self.process.pid, *children_of(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def workers(self) -> list[int]:
        """Processes of the ranks, by local rank."""
        ranks = children_of(self.process.pid, deep=False)
        return sorted(p for p in ranks if b"LOCAL_RANK=" in _environ(p))

    def leave(self) -> None:
        """The agent is asked to end."""
        self.process.send_signal(signal.SIGTERM)

    def ended(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            text = self.log.read_text()
            self.kill()
            raise Hang(f"the node did not end within {timeout_s} s\n{text[-3000:]}") from None


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def wait_until(true: Callable, timeout_s: float, what: str) -> None:
    """Wait until a condition holds; Hang where it does not in time."""
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            raise Hang(f"{what} did not happen within {timeout_s} s")
        time.sleep(0.1)
