"""The loop. Edit it: what a run does once its parts are built happens here, top to bottom."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwork import build, checkpoint
from meshwork.batch import Batch, BatchPlan
from meshwork.checkpoint import Position
from meshwork.config import Config, ConfigError
from meshwork.data.loader import eval_steps, explain, loader, step_size, train_steps
from meshwork.distributed import World
from meshwork.evaluate import Result, evaluate
from meshwork.memory import out_of_memory
from meshwork.meter import Meter
from meshwork.optim import Horizon, Schedule
from meshwork.parallel.engine import Engine
from meshwork.parallel.fsdp import local
from meshwork.report import Report
from meshwork.rundir import RunDir


@dataclass
class Job:
    """The parts of a run, as train.py put them together. data: as build_data returned it."""

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


@dataclass
class Outcome:
    """Where a run stands. final: last metrics of each name; best: those of the best validation,
    with its step; checkpoint: the newest."""

    position: Position = field(default_factory=Position)
    final: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] | None = None
    checkpoint: Any = None


def fit(job: Job) -> Outcome:
    """Train from where the run stands to its horizon, or to trainer.stop_at_step.

    All ranks call it. Raises FloatingPointError where the loss is not finite, ConfigError with the
    next smaller micro-batch where memory runs out.
    """
    t, c, engine, report = job.cfg.trainer, job.cfg.checkpoint, job.engine, job.report
    outcome = resume(job, with_optimizer=True)
    position = outcome.position
    first, stop = position.step, min(job.horizon.steps, t.stop_at_step or job.horizon.steps)
    if first >= stop:
        report.note(f"step {first} of {stop} is reached: nothing left to train")
        return outcome
    validation = evaluation_set(job, job.data.val)
    batches = train_batches(job, position)
    profiler = report.profiler(job.run.path) if t.profile else None
    after_step = getattr(engine.task, "after_step", None)
    report.begin(job.horizon.steps, first)
    engine.train()
    meter, before = Meter(), time.perf_counter()
    while position.step < stop:
        batch = next(batches)
        waited = time.perf_counter() - before
        lr = job.schedule.set(position.step)
        try:
            batch = batch.to(job.world.device, engine.dtype)
            if position.step == 0:
                report.batch_picture(batch)
            shares = engine.step(batch)
            advance(position, batch.total, job)
            at_end = position.step == stop
            logs = at_end or position.step == first + 1 or position.step % t.log_every_n_steps == 0
            if logs or t.clip_grad_norm is not None:
                engine.unscale(job.optimizer)
                norm = engine.clip_grad_norm(t.clip_grad_norm)
            engine.update(job.optimizer)
        except RuntimeError as e:
            if (sentence := out_of_memory(e, job.plan)) is None:
                raise
            raise sentence from e
        if after_step is not None:
            after_step(engine.module, position)
        meter.add(shares, batch.total, waited)
        if batch.bad:
            report.bad_images(batch.bad)
        if profiler:
            profiler.step()
        if logs:
            metrics = train_metrics(meter, norm, lr, job, position)
            report.train_line(metrics, position)
            outcome.final |= metrics
            meter = Meter()
        paused = time.perf_counter()
        if at_end or due(position, t.val_every_n_steps, t.val_every_n_epochs):
            validate(job, validation, outcome, at_end)
        if at_end or due(position, c.every_n_steps, c.every_n_epochs):
            save(job, meter, outcome)
        before = time.perf_counter()
        meter.since += before - paused
    if profiler:
        profiler.stop()
    return outcome


def train_batches(job: Job, position: Position) -> Iterator[Batch]:
    """Batches of this rank without end, from a position of the data's order on."""
    cfg, data = job.cfg, job.data
    samples = build.build_samples(cfg, data.train, data, job.engine.module, job.engine.task, True)
    start = (job.engine.data_rank, cfg.seed, position.epoch, position.offset, cfg.data.drop_last)
    steps = train_steps(len(samples), job.plan, *start)
    timeout_s = cfg.runtime.timeout_s
    batches = iter(loader(samples, steps, cfg.data.workers, job.world.device, timeout_s))
    first = None
    with explained():
        while True:
            batch = first or next(batches)
            first = batch if cfg.trainer.overfit_one_batch else None
            yield batch


@contextmanager
def explained() -> Iterator[None]:
    """What a person can mend of the loader's errors leaves as a sentence."""
    try:
        yield
    except Exception as e:
        if (sentence := explain(e)) is None:
            raise
        raise ConfigError(sentence) from e


def advance(position: Position, total: int, job: Job) -> None:
    """Move on by a step of `total` samples; an epoch ends where no further step fits."""
    position.step += 1
    position.samples += total
    position.offset += total
    if not step_size(len(job.data.train), job.plan, position.offset, job.cfg.data.drop_last):
        position.epoch, position.offset = position.epoch + 1, 0


def due(position: Position, steps: int | None, epochs: int | None) -> bool:
    """Whether something that happens every so many steps, or epochs, happens now."""
    epoch_ended = position.offset == 0
    return bool(
        (steps and position.step % steps == 0)
        or (epochs and epoch_ended and position.epoch % epochs == 0)
    )


def train_metrics(meter: Meter, norm: Tensor, lr: float, job: Job, position: Position) -> dict:
    """A line of metrics: means since the last line, gradient norm and rate of this very step."""
    means = meter.means(job.world)
    if not math.isfinite(means["loss"]):
        raise not_finite(job, position)
    elapsed = time.perf_counter() - meter.since
    return {
        **{f"train/{name}": value for name, value in means.items()},
        "train/grad_norm": float(norm),
        "train/lr": lr,
        "train/samples_per_s": meter.samples / elapsed,
        "train/wait": min(1.0, meter.wait_s / elapsed),
    }


def not_finite(job: Job, position: Position) -> FloatingPointError:
    """The error for a loss or weights that are not finite."""
    last = checkpoint.newest(job.run.path)
    since = f"; the last good checkpoint is {last}" if last else ""
    return FloatingPointError(
        f"the loss is not finite at or before step {position.step}{since}: lower optimizer.lr, set "
        "trainer.clip_grad_norm=1, lengthen the warm-up, or look with debug=anomaly"
    )


def evaluation_set(job: Job, dataset: Any) -> Any:
    """A loader over each sample of a data set once, over all ranks; None where there is no data
    set."""
    if dataset is None:
        return None
    cfg = job.cfg
    samples = build.build_samples(
        cfg, dataset, job.data, job.engine.module, job.engine.task, train=False
    )
    steps = eval_steps(len(samples), job.plan.evaluated, job.engine.data_rank, job.plan.ranks)
    return loader(samples, steps, cfg.data.workers, job.world.device, cfg.runtime.timeout_s)


def validate(job: Job, batches: Any, outcome: Outcome, in_full: bool, split: str = "val") -> None:
    """Evaluate, log, and keep the best; in_full: with pictures of the worst samples."""
    if batches is None:
        return
    with explained():
        result = evaluate(job.engine, batches, job.world, in_full, split, job.report.loggers)
    job.report.bad_images(result.bad)
    job.report.validation_line(result, outcome.position)
    outcome.final |= result.metrics
    if split == "val":
        outcome.best = better(job, result, outcome)


def better(job: Job, result: Result, outcome: Outcome) -> dict[str, float]:
    """The better of the best so far and this validation; the same on all ranks, as its sums are."""
    metric, mode = job.report.objective
    if metric not in result.metrics:
        raise ConfigError(
            f"objective.metric={metric} is not among the metrics of this run: "
            f"choose one of {', '.join(result.metrics)}"
        )
    new = {"step": outcome.position.step, **result.metrics}
    if outcome.best is None or math.isnan(outcome.best[metric]):
        return new
    gain = new[metric] - outcome.best[metric]
    return new if (gain > 0 if mode == "max" else gain < 0) else outcome.best


def save(job: Job, meter: Meter, outcome: Outcome) -> None:
    """Save a checkpoint, after asking all ranks whether every weight is finite."""
    weights = [local(p.detach()) for _, p in job.engine.named_parameters()]
    values = [v.cpu().double() for v in meter.shares.values()]
    values.append(torch.stack(torch._foreach_norm(weights)).cpu().double().sum())
    if not bool(torch.isfinite(job.world.sum(torch.stack(values).sum()))):
        raise not_finite(job, outcome.position)
    facts = {
        "best": outcome.best,
        "final": outcome.final,
        "seed": job.cfg.seed,
        "global_batch_size": job.plan.global_batch,
        "micro_batch_size": job.plan.micro,
    }
    path = checkpoint.save(
        job.run.checkpoints, job.engine, job.optimizer, outcome.position, job.world, facts
    )
    outcome.checkpoint = path
    if job.world.is_main:
        best = f"step_{outcome.best['step']}" if outcome.best else None
        checkpoint.prune(job.run.checkpoints, job.cfg.checkpoint.keep, best)
    job.report.saved(path, outcome.position)


def resume(job: Job, with_optimizer: bool) -> Outcome:
    """Load the checkpoint that checkpoint.resume means, if any; rank 0 looks, all load the same."""
    found = None
    if job.world.is_main:
        try:
            found = checkpoint.find(job.cfg.checkpoint.resume, job.run.path)
        except ConfigError as e:
            found = e
    found = job.world.from_main(found)
    if isinstance(found, ConfigError):
        raise found
    if found is None:
        return Outcome()
    optimizer = job.optimizer if with_optimizer else None
    position, state = checkpoint.load(found, job.engine, optimizer, job.world)
    job.report.note(f"loaded {found}: step {position.step}, epoch {position.epoch}")
    if with_optimizer:
        keep_to(state, job)
    return Outcome(position, state.get("final") or {}, state.get("best"), found)


def keep_to(state: dict, job: Job) -> None:
    """What is typed wins over what was saved, but for the seed: the data's order goes on."""
    seed = state.get("seed", job.cfg.seed)
    if seed != job.cfg.seed:
        job.report.note(f"seed={seed} as in the checkpoint, not {job.cfg.seed}")
        job.cfg.seed = seed
    kind, micro = type(job.optimizer).__name__, job.plan.micro
    if state.get("optimizer", kind) != kind:
        job.report.note(
            f"{kind} starts afresh: the checkpoint has the state of {state['optimizer']}"
        )
    if job.plan.coupled and state.get("micro_batch_size", micro) != micro:
        job.report.note(
            f"BatchNorm over {micro} samples, in the checkpoint over {state['micro_batch_size']}: "
            f"trainer.micro_batch_size={state['micro_batch_size']} keeps to it"
        )
