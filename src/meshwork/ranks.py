"""Which process this is: ranks as torchrun, a Slurm step or a person exported them. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwork.config import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
BY_HAND = "hand-exported variables"


@dataclass(frozen=True)
class Ranks:
    """This process among all of a job.

    local_world_size and node_rank are None where a person exported the ranks: they are filled from
    host names once the ranks can talk. master: (address, port) of the store, None for one process
    on its own. restarts: how often torchrun has started this worker again, which a node that joins
    later counts from 0. reused_store: whether the store has served the attempts before, too.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = 1
    node_rank: int | None = 0
    source: str = "one process"
    master: tuple[str, int] | None = None
    restarts: int = 0
    reused_store: bool = False


def ranks_from(env: Mapping[str, str]) -> Ranks:
    """Ranks from the environment: torchrun's variables, then a Slurm step's, then hand-exported
    ones, else one process.

    Variables of a Slurm job without a step, and those of MPI, never count. A step of one task (the
    shell of `srun --pty bash` is one) is no distributed job and hides nothing.
    Raises ConfigError with every variable and its value where a set is incomplete or out of range.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return _from_torchrun(env)
    if env.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return _from_slurm_step(env)
    if "RANK" in env or "LOCAL_RANK" in env:
        return _from_five(env, BY_HAND, local_world_size=None, node_rank=None)
    return Ranks()


def first_host(nodelist: str) -> str:
    """First host of Slurm's compressed list: gpu[003-005,9],login1 -> gpu003."""
    head, number, tail = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodelist).groups()
    return head + (number or "") + (tail or "")


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    return _from_five(
        env,
        "torchrun",
        local_world_size=_number(env.get("LOCAL_WORLD_SIZE")) or 1,
        node_rank=_number(env.get("GROUP_RANK")) or 0,
        restarts=_number(env.get("TORCHELASTIC_RESTART_COUNT")) or 0,
        reused_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm_step(env: Mapping[str, str]) -> Ranks:
    names = ("PROCID", "LOCALID", "NODEID", "STEP_NODELIST", "STEP_TASKS_PER_NODE")
    missing = [f"SLURM_{n}" for n in names if f"SLURM_{n}" not in env]
    local_tasks = None if missing else _local_tasks(env)
    if local_tasks is None:
        names = ("STEP_NUM_TASKS", *names)
        values = ", ".join(_shown(env, f"SLURM_{n}") for n in names)
        wrong = f"{', '.join(missing)} missing" if missing else "the node's tasks cannot be read"
        raise ConfigError(
            f"ranks from a Slurm step: {wrong}. Found {values}: start with srun, or unset "
            "SLURM_STEP_NUM_TASKS"
        )
    job, step = (_number(env.get(n)) or 0 for n in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    five = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(env["SLURM_STEP_NODELIST"]),
        # Below the ports a kernel hands out by itself, and apart for steps that share a node.
        "MASTER_PORT": str(15000 + (job * 131 + step) % 17000),
    }
    node = int(env["SLURM_NODEID"])
    return _from_five(five, "a Slurm step", local_world_size=local_tasks, node_rank=node)


def _local_tasks(env: Mapping[str, str]) -> int | None:
    """Tasks on this node, from the compressed counts of a step: 4(x2),3 means 4, 4 and 3.

    None where the counts or the node's number make no sense.
    """
    counts = []
    for item in env["SLURM_STEP_TASKS_PER_NODE"].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    node = _number(env["SLURM_NODEID"])
    return counts[node] if node is not None and 0 <= node < len(counts) else None


def _from_five(env: Mapping[str, str], source: str, **rest) -> Ranks:
    """Ranks from torch's five variables; `rest` goes to Ranks as it is."""
    if wrong := _wrong_in(env):
        raise ConfigError(
            f"ranks from {source}: {'; '.join(wrong)}. Found "
            f"{', '.join(_shown(env, n) for n in NAMES)}: export all five for every process, start "
            "torchrun --standalone --nproc-per-node=N train.py, or unset RANK and LOCAL_RANK for "
            "one process"
        )
    rank, world, local, port = (int(env[n]) for n in NAMES if n != "MASTER_ADDR")
    return Ranks(rank, local, world, source=source, master=(env["MASTER_ADDR"], port), **rest)


def _wrong_in(env: Mapping[str, str]) -> list[str]:
    """What is missing, no number or out of range among the five variables."""
    wrong = [f"{n} is missing" for n in NAMES if not env.get(n, "").strip()]
    numbers = {n: _number(env.get(n)) for n in NAMES if n != "MASTER_ADDR"}
    wrong += [
        f"{n} is no number" for n, v in numbers.items() if v is None and env.get(n, "").strip()
    ]
    world, port = numbers["WORLD_SIZE"], numbers["MASTER_PORT"]
    for name in ("RANK", "LOCAL_RANK"):
        if None not in (numbers[name], world) and not 0 <= numbers[name] < world:
            wrong.append(f"0 <= {name} < WORLD_SIZE does not hold")
    if port is not None and not 0 < port < 65536:
        wrong.append("MASTER_PORT is not between 1 and 65535")
    return wrong


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\s*-?\d+\s*", text) else None


def _shown(env: Mapping[str, str], name: str) -> str:
    return f"{name}={env[name]}" if name in env else f"{name} (unset)"
