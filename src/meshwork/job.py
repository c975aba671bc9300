"""A run's parts and where it stands; saved to a checkpoint and loaded from one."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from meshwork import build, checkpoint
from meshwork.batch import BatchPlan
from meshwork.checkpoint import Position, Saver
from meshwork.checkpoint_files import DiskFull, newest
from meshwork.config import Config, ConfigError, Failure
from meshwork.distributed import World
from meshwork.ema import Ema
from meshwork.meter import Meter
from meshwork.optim import Horizon, Schedule
from meshwork.parallel.engine import Engine
from meshwork.parallel.fsdp import local
from meshwork.report import Report
from meshwork.resume import Found
from meshwork.rundir import RunDir
from meshwork.stopping import Stop


@dataclass
class Job:
    """The parts of a run, as train.py put them together. data: as build_data returned it. found:
    the checkpoint it starts from. ema: None where no average is kept."""

    cfg: Config
    world: World
    run: RunDir
    engine: Engine
    plan: BatchPlan
    horizon: Horizon
    data: Any
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    report: Report
    saver: Saver
    stop: Stop
    ema: Ema | None = None
    found: Found | None = None


@dataclass
class Outcome:
    """Where a run stands.

    final: last metrics of each name. best: those of the best validation, with its step. stale:
    validations since then. unvalidated: one is due that was broken off. checkpoint: the newest.
    stopped: by a signal or the stop file.
    """

    position: Position = field(default_factory=Position)
    final: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] | None = None
    stale: int = 0
    unvalidated: bool = False
    checkpoint: Any = None
    stopped: bool = False


def save(job: Job, meter: Meter, outcome: Outcome, last: bool) -> None:
    """Save a checkpoint, after asking all ranks whether every weight is finite.

    last: wait until it is written.
    """
    began = time.perf_counter()
    path = job.run.checkpoints / f"step_{outcome.position.step}"
    if outcome.checkpoint == path:  # saved a moment ago
        job.report.saved(job.saver.wait())
        return
    job.world.beat("saving", patient=True)
    weights = [local(p.detach()) for _, p in job.engine.named_parameters()]
    values = [v.cpu().double() for v in meter.shares.values()]
    values.append(torch.stack(torch._foreach_norm(weights)).cpu().double().sum())
    if not bool(torch.isfinite(job.world.sum(torch.stack(values).sum()))):
        raise not_finite(job, outcome.position)
    facts = {
        "best": outcome.best,
        "final": outcome.final,
        "stale": outcome.stale,
        "unvalidated": outcome.unvalidated,
        "seed": job.cfg.seed,
        "lr": job.cfg.optimizer.lr,
        "global_batch_size": job.plan.global_batch,
        "micro_batch_size": job.plan.micro,
        "layout": str(job.engine.layout),
        "attempt": job.run.attempt,
        **build.input_facts(job.data, job.engine.module),
    }
    try:
        job.report.saved(job.saver.wait())
        job.saver.save(job.engine, job.optimizer, job.ema, outcome.position, facts)
        if last:
            job.report.saved(job.saver.wait())
    except DiskFull as e:
        if last or job.cfg.checkpoint.on_full_disk == "stop":
            raise
        job.report.note(f"{e}; training goes on without this checkpoint")
    else:
        outcome.checkpoint = path
    job.report.took("save", time.perf_counter() - began)


def load(job: Job, with_optimizer: bool) -> Outcome:
    """Load the checkpoint that the run starts from, if any."""
    if job.found is None:
        return Outcome()
    path, state = job.found.path, job.found.state
    try:
        position = Position(**{k: int(state[k]) for k in asdict(Position())})
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"{path} names no position of its run ({e}): choose another one") from e
    job.world.beat("loading", patient=True)
    optimizer = job.optimizer if with_optimizer else None
    checkpoint.load(path, state, job.engine, optimizer, job.ema, job.world)
    for note in job.found.notes:
        job.report.note(note)
    job.report.note(f"loaded {path}: step {position.step}, epoch {position.epoch}")
    kind = type(job.optimizer).__name__
    if with_optimizer and state.get("optimizer", kind) != kind:
        job.report.note(
            f"{kind} starts afresh: the checkpoint has the state of {state['optimizer']}"
        )
    known = {k: state[k] for k in ("final", "best", "stale", "unvalidated") if state.get(k)}
    return Outcome(position, **known, checkpoint=path)


def not_finite(job: Job, position: Position) -> Failure:
    """The error for a loss or weights that are not finite."""
    last = newest(job.run.path)
    since = f"; the last good checkpoint is {last}" if last else ""
    return Failure(
        f"the loss is not finite at or before step {position.step}{since}: lower optimizer.lr, set "
        "trainer.clip_grad_norm=1, lengthen the warm-up, or look with debug=anomaly"
    )
