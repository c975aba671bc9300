"""The loop. Edit it: what a run does once its parts are built happens here, top to bottom."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from meshwork import build
from meshwork.batch import Batch
from meshwork.checkpoint import Position
from meshwork.config import ConfigError
from meshwork.data.loader import eval_steps, explain, loader, step_size, train_steps
from meshwork.evaluate import evaluate
from meshwork.job import Job, Outcome, load, not_finite, save
from meshwork.memory import out_of_memory
from meshwork.meter import Meter


def fit(job: Job) -> Outcome:
    """Train from where the run stands to its horizon, or to trainer.stop_at_step.

    All ranks call it. Raises Failure where the loss is not finite, ConfigError with the next
    smaller micro-batch where memory runs out.
    """
    t, c, engine, report = job.cfg.trainer, job.cfg.checkpoint, job.engine, job.report
    outcome = load(job, with_optimizer=True)
    position = outcome.position
    first, last = position.step, min(job.horizon.steps, t.stop_at_step or job.horizon.steps)
    patience = t.early_stop or math.inf
    validation = evaluation_set(job, job.data.val)
    if outcome.unvalidated:
        validate(job, validation, outcome, first >= last)
    if first >= last or outcome.stale >= patience:
        early = f", {outcome.stale} validations since the best" if first < last else ""
        report.note(f"step {first} of {last} is reached{early}: nothing left to train")
        return outcome
    batches = train_batches(job, position)
    profiler = report.profiler(job.run.path) if t.profile else None
    after_step = getattr(engine.task, "after_step", None)
    report.begin(job.horizon.steps, first)
    engine.train()
    meter, before = Meter(), time.perf_counter()
    while position.step < last and outcome.stale < patience and not job.stop.agreed():
        job.world.beat(f"step {position.step + 1}", patient=position.step == first)
        batch = next(batches)
        waited = time.perf_counter() - before
        lr = job.schedule.set(position.step)
        try:
            batch = batch.to(job.world.device, engine.dtype)
            if position.step == 0:
                report.batch_picture(batch)
            shares = engine.step(batch)
            advance(position, batch.total, job)
            at_end = position.step == last
            logs = at_end or position.step == first + 1 or position.step % t.log_every_n_steps == 0
            if logs or t.clip_grad_norm is not None:
                engine.unscale(job.optimizer)
                norm = engine.clip_grad_norm(t.clip_grad_norm)
            engine.update(job.optimizer)
        except RuntimeError as e:
            if (sentence := out_of_memory(e, job.plan)) is None:
                raise
            raise sentence from e
        if job.ema is not None:
            job.ema.update(position.step)
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
        report.took("step", paused - before, position.step == first + 1)
        best = outcome.best
        if at_end or due(position, t.val_every_n_steps, t.val_every_n_epochs):
            validate(job, validation, outcome, at_end)
        if outcome.unvalidated:
            break
        at_end = at_end or outcome.stale >= patience
        is_best = outcome.best is not best
        if at_end or is_best or due(position, c.every_n_steps, c.every_n_epochs):
            save(job, meter, outcome, at_end)
        report.saved(job.saver.finished())
        before = time.perf_counter()
        meter.since += before - paused
    outcome.stopped = outcome.unvalidated or (job.stop.decided and position.step < last)
    if outcome.stopped and position.step > first:
        save(job, meter, outcome, True)
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
    """Evaluate the weights, and their average where one is kept; log, and keep the best.

    in_full: with pictures of the worst samples. A request to stop breaks it off.
    """
    if batches is None:
        return
    report, metrics = job.report, {}
    weights = [(split, nullcontext())]
    if job.ema is not None:
        weights.append((f"{split}_ema", job.ema.swapped(job.engine)))
    for name, swapped in weights:
        parts = job.world, in_full and name == split, name, report.loggers, job.stop.agreed
        with explained(), swapped:
            result = evaluate(job.engine, batches, *parts)
        outcome.unvalidated = result is None
        if result is None:
            return
        report.bad_images(result.bad)
        report.validation_line(result, outcome.position)
        metrics |= result.metrics
    outcome.final |= metrics
    if split == "val":
        keep_best(job, metrics, outcome)


def keep_best(job: Job, metrics: dict[str, float], outcome: Outcome) -> None:
    """Compare with the best so far; the same on all ranks, as the sums are."""
    metric, mode = job.report.objective
    if metric not in metrics:
        raise ConfigError(
            f"objective.metric={metric} is not among the metrics of this run: "
            f"choose one of {', '.join(metrics)}"
        )
    before = outcome.best[metric] if outcome.best else math.nan
    gain = (metrics[metric] - before) * (1 if mode == "max" else -1)
    if math.isnan(before) or gain > 0:
        outcome.best, outcome.stale = {"step": outcome.position.step, **metrics}, 0
    else:
        outcome.stale += 1
