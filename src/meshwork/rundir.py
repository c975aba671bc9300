"""One run, one folder: its identity, what it says of itself, its status and result."""

import faulthandler
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwork.config import Config, ConfigError, resolved_yaml
from meshwork.distributed import World

log = logging.getLogger("meshwork")
ENV_RUN_ID = "MESHWORK_RUN_ID"
LOCK_S = 20.0  # a run that was killed may take a moment to be gone


@dataclass(frozen=True)
class RunDir:
    """The folder of a run, the same on every rank.

    id: of the run, also in W&B. attempt: 1 for a fresh folder, one more each time the run is
    entered.
    """

    path: Path
    id: str
    attempt: int
    notice: str = ""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def status(self, state: str, **facts: Any) -> None:
        """Write status.json; state: running, finished, stopped or failed."""
        write_json(
            self.path / "status.json",
            {**self.read_status(), "state": state, "time": time.time(), **facts},
        )

    def read_status(self) -> dict:
        return read_json(self.path / "status.json")


def read_json(path: Path) -> dict:
    """A JSON object, empty where the file is not there or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write_json(path: Path, value: dict) -> None:
    """Write a JSON object so that a reader sees the old one or the new one."""
    partial = path.with_suffix(f".tmp{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def sweep_of(hydra: Any) -> tuple[str, int] | None:
    """(folder of the sweep, number of this job) from Hydra's own config; None for a single run."""
    if hydra.mode is None or hydra.mode.name != "MULTIRUN":
        return None
    return os.path.abspath(hydra.sweep.dir), int(hydra.job.num)


def check_writable(cfg: Config, sweep: tuple[str, int] | None) -> None:
    """Raise ConfigError where the run folder cannot be made; called before anything heavy."""
    key = "run.dir" if cfg.run.dir else "hydra.sweep.dir" if sweep else "run.root"
    wanted = Path(cfg.run.dir or (sweep[0] if sweep else cfg.run.root))
    place = wanted
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"{key}={wanted}: {place} is not a folder: choose another {key}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={wanted}: {place} cannot be written to: choose another {key}")
    if cfg.run.id is not None and not re.fullmatch(r"[\w.-]+", cfg.run.id):
        raise ConfigError(
            f"run.id={cfg.run.id}: expected letters, digits, dots, dashes and underscores"
        )


def enter(cfg: Config, world: World, overrides: list[str], sweep: tuple[str, int] | None) -> RunDir:
    """Agree on the run, make or find its folder, and prove that every rank sees it.

    overrides: as typed. sweep: (folder, number of the job) in a sweep. Rank 0 makes the folder.
    Raises ConfigError where the folder cannot be made or another node does not see it.
    """
    lock = None

    def make() -> RunDir:
        nonlocal lock
        run = _make(cfg, world, overrides, sweep)
        lock = _lock(run.path)
        attempt = read_json(run.path / "status.json").get("attempt", 0) + 1
        return replace(run, attempt=attempt)

    try:
        run = world.on_main(make)
    except OSError as e:
        raise ConfigError(
            f"the run folder cannot be made ({e}): choose another run.root or run.dir"
        ) from e
    if lock is not None:
        world.at_exit.append(lambda _: lock.release())
    _prove_shared(run, world)
    return run


def _lock(path: Path) -> Any:
    """The lock of a run folder, once it is free; it goes with the process that holds it.

    None where the file system knows no locks. Raises ConfigError where another run stays alive.
    """
    from filelock import FileLock, Timeout

    try:
        lock = FileLock(path / ".lock", timeout=LOCK_S)
        lock.acquire()
        return lock
    except Timeout:
        status = read_json(path / "status.json")
        hosts = ", ".join(status.get("hosts", ()))
        raise ConfigError(
            f"run folder {path} is written by another live run (pid {status.get('pid')} on "
            f"{hosts}): wait for it, stop it, or choose another run.dir or run.id"
        ) from None
    except (OSError, NotImplementedError) as e:
        log.warning("%s takes no lock (%s): do not start a second run in it", path, e)
        return None


def _stamp(world: World) -> str:
    """<start>_<hex>, agreed by all ranks and attempts of a job through its store."""
    stamp = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(4)}"
    return stamp if world.store is None else world.store.compare_set("run", "", stamp).decode()


def _make(cfg: Config, world: World, overrides: list[str], sweep: tuple[str, int] | None) -> RunDir:
    stamp = _stamp(world)
    named = cfg.run.id or os.environ.get(ENV_RUN_ID)
    launched = _launch_id()
    run_id = named or launched or stamp.rsplit("_", 1)[-1]
    notice = ""
    if cfg.run.dir or sweep:
        path = Path(cfg.run.dir) if cfg.run.dir else Path(sweep[0]) / str(sweep[1])
        run_id = named or read_json(path / "status.json").get("id") or run_id
    elif named := named or launched:
        path = _find(Path(cfg.run.root), named)
        if (
            path
            and cfg.run.id is None
            and (why := _other_run(path, overrides, world.ranks.restarts))
        ):
            run_id, path = _next_free(Path(cfg.run.root), named)
            notice = f"run {named} {why}: this one is {run_id}"
        path = path or Path(cfg.run.root) / f"{stamp.rsplit('_', 1)[0]}_{run_id}"
    else:
        path = Path(cfg.run.root) / stamp
    path.mkdir(parents=True, exist_ok=True)
    return RunDir(path.resolve(), run_id, 1, notice)


def _launch_id() -> str | None:
    """An id for what torchrun has started, the same after a restart, a join and a loss of nodes."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if launch == "none" else hashlib.blake2s(launch.encode(), digest_size=4).hexdigest()


def _find(root: Path, run_id: str) -> Path | None:
    """The newest folder <start>_<run_id>."""
    pattern = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_" + re.escape(run_id))
    found = [p for p in root.glob(f"*_{run_id}") if pattern.fullmatch(p.name)]
    return max(found, default=None)


def _other_run(path: Path, overrides: list[str], restarts: int) -> str | None:
    """Why a folder found by an id nobody typed is another run's, if it is."""
    saved = read_json(path / "status.json")
    if saved.get("overrides", overrides) != overrides:
        return "was started with other overrides"
    if saved.get("state") == "finished" and not restarts:
        return "has finished"
    return None


def _next_free(root: Path, run_id: str) -> tuple[str, Path | None]:
    n = 2
    while _find(root, f"{run_id}-{n}"):
        n += 1
    return f"{run_id}-{n}", None


def _prove_shared(run: RunDir, world: World) -> None:
    """Every rank must find rank 0's token: a folder on a disk of one node would lose the others'
    work."""
    token = world.from_main(secrets.token_hex(8) if world.is_main else None)
    file = run.path / f".token-{token}"
    if world.is_main:
        file.touch()
    world.from_main(None)
    missing = None if file.exists() else f"node {socket.gethostname()} does not see it"
    blind = [m for m in world.from_main(world.to_main(missing)) if m]
    if world.is_main:
        file.unlink()
    if blind:
        raise ConfigError(
            f"run folder {run.path} is not shared: {blind[0]}; set run.dir or run.root to a "
            "shared path"
        )


def describe(run: RunDir, cfg: Config, world: World, hydra: Any, overrides: list[str]) -> None:
    """Rank 0 writes what the run is; an earlier attempt's files stay.

    hydra: Hydra's own config, kept for Hydra's tools. overrides: as typed.
    """
    from omegaconf import OmegaConf

    from meshwork import provenance

    first = run.attempt == 1
    suffix = "" if first else f".attempt_{run.attempt}"
    text = provenance.redact(resolved_yaml(cfg))
    (run.path / f"config{suffix}.yaml").write_text(text)
    folder = run.path / ".hydra" if first else run.path / ".hydra" / f"attempt_{run.attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(text)
    (folder / "hydra.yaml").write_text(provenance.redact(OmegaConf.to_yaml(hydra)))
    typed = [provenance.redact(o) for o in overrides]
    (folder / "overrides.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(typed)))
    facts = provenance.collect(sys.argv, world.ranks, world.device)
    write_json(run.path / f"provenance{suffix}.json", facts)
    if diff := provenance.git_diff():
        (run.path / f"provenance{suffix}.diff").write_text(diff)
    hosts = list(dict.fromkeys(world.hosts))
    named = {"id": run.id, "attempt": run.attempt, "hosts": hosts, "pid": os.getpid()}
    if cfg.mode == "train" or first:  # a look at a trained run is not what it was trained with
        run.status("running", **named, overrides=typed)
    link_latest(run)


def rows(run: RunDir) -> list[tuple[str, str]]:
    """The run's rows of the start table."""
    notice = f"\n{run.notice}" if run.notice else ""
    return [("run", f"{run.id}, attempt {run.attempt}{notice}"), ("folder", str(run.path))]


def link_latest(run: RunDir) -> None:
    """Point `latest` beside the run folder to it; a file system without links goes without."""
    link = run.path.parent / "latest"
    partial = run.path.parent / f".latest-{run.id}"
    try:
        if link.is_symlink() or not link.exists():
            partial.symlink_to(run.path.name)
            partial.replace(link)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)


def log_to_file(run: RunDir, world: World) -> None:
    """Send this rank's log, warnings included, to logs/rank<r>.log in the run folder.

    On SIGQUIT the stacks of all its threads go to logs/rank<r>.stacks.txt.
    """
    rank = world.ranks.rank
    folder = run.path / "logs"
    folder.mkdir(exist_ok=True)
    handler = logging.FileHandler(folder / f"rank{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, logging.FileHandler)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is not told once for every line
    log.setLevel(logging.INFO)
    world.stacks = open(folder / f"rank{rank}.stacks.txt", "a")  # open as long as the process
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGQUIT, world.stacks, all_threads=True)
    log.disabled = False  # Hydra's logging setup switches off loggers that were there before it
