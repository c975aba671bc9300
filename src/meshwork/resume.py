"""Where a run starts: which checkpoint, what of it holds, and what of it this config overrules."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwork import checkpoint_files as files
from meshwork.batch import BatchPlan
from meshwork.config import Config, ConfigError
from meshwork.data.loader import step_size
from meshwork.data.order import VERSION
from meshwork.distributed import World
from meshwork.mesh import Layout
from meshwork.optim import Horizon
from meshwork.rundir import RunDir


@dataclass(frozen=True)
class Found:
    """The checkpoint a run starts from. state: its plain values. notes: sentences for a person."""

    path: Path
    state: dict
    notes: tuple[str, ...] = ()


def check(resume: str) -> None:
    """Raise ConfigError where `checkpoint.resume` is a path without a complete checkpoint."""
    if resume not in ("auto", "never", "best"):
        _named(resume)


def _named(resume: str) -> Path:
    found = files.newest(Path(resume)) if Path(resume).is_dir() else None
    if found is None:
        state = "holds no complete checkpoint" if Path(resume).exists() else "does not exist"
        raise ConfigError(
            f"checkpoint.resume={resume} {state}: expected a run folder, or a folder step_<n> "
            f"with {files.MARKER}"
        )
    return found


def candidates(resume: str, run: RunDir) -> list[Path]:
    """The checkpoints that `checkpoint.resume` means, the first choice first.

    resume: auto (of the run's own folder), never, best (of it), or the path of a run or checkpoint.
    A run that was started from another one goes on from its own checkpoints once it has some.
    """
    own = files.steps(run.path)[::-1]
    if resume == "auto":
        return own
    if resume == "never":
        return []
    if resume == "best":
        if (best := files.best(run.path)) is None:
            raise ConfigError(
                f"checkpoint.resume=best: {run.checkpoints} has no {files.BEST}: give the path of "
                "a checkpoint, or run.reopen=RUN of a run that has validated"
            )
        return [best]
    found = _named(resume)
    return own if own and run.path not in found.parents else [found]


def choose(cfg: Config, run: RunDir, world: World) -> Found | None:
    """The checkpoint to start from, the same on all ranks; None starts afresh.

    A damaged one is left out for the next older where the run's own newest was asked for; a path
    that was typed has to be good. Raises ConfigError where none is.
    """
    resume = cfg.checkpoint.resume
    paths = world.on_main(candidates, resume, run)
    tried: list[str] = []
    for path in paths:
        reason = files.problem_together(path, world)
        if reason is None:
            state = world.on_main(files.read_state, path)
            return Found(path, state, tuple(f"{text}: left out" for text in tried))
        tried.append(reason)
        if len(paths) == 1 and resume != "auto":
            raise ConfigError(f"checkpoint.resume={resume}: {reason}: choose another checkpoint")
        if world.is_main and cfg.mode == "train":
            files.put_aside(path)
    if tried:
        raise ConfigError(
            f"no checkpoint in {run.checkpoints} can be used: {'; '.join(tried)}: "
            "checkpoint.resume=never starts afresh"
        )
    return None


def settle(cfg: Config, found: Found, plan: BatchPlan, data: Any, layout: Layout) -> Found:
    """Compare a checkpoint with this run, and keep to it where the run would go another way else.

    The seed, and the samples that BatchNorm sees, stay as they were; everything else that is typed
    wins. Returns `found` with a note for each difference: saved, asked and used value.
    """
    state, notes = found.state, list(found.notes)

    def compare(key: str, asked: Any, kept: bool = False) -> None:
        saved = state.get(key.split(".")[-1], asked)
        if saved != asked:
            used = saved if kept else asked
            notes.append(f"{key}: {_short(saved)} in the checkpoint, {_short(asked)} asked, "
                         f"{_short(used)} used")  # fmt: skip

    compare("seed", cfg.seed, kept=True)
    cfg.seed = state.get("seed", cfg.seed)
    compare("trainer.global_batch_size", plan.global_batch)
    compare("optimizer.lr", cfg.optimizer.lr)
    compare("classes", list(data.classes))
    if plan.coupled:
        compare("trainer.micro_batch_size", plan.micro, cfg.trainer.micro_batch_size is None)
        if cfg.trainer.micro_batch_size is None:
            cfg.trainer.micro_batch_size = state.get("micro_batch_size", plan.micro)
    if state.get("order_version", VERSION) != VERSION:
        notes.append("the order of samples is another one than the checkpoint's: its epoch is not "
                     "continued sample by sample")  # fmt: skip
    if state.get("layout", str(layout)) != str(layout):
        notes.append(f"saved under {state['layout']}, goes on under {layout}")
    return replace(found, notes=tuple(notes))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def horizon_of(
    cfg: Config, found: Found | None, plan: BatchPlan, n: int, horizon: Horizon
) -> Horizon:
    """The length of a run that goes on: its epochs in steps of the batch size of now.

    n: training samples. A run of trainer.max_steps keeps to it.
    """
    if found is None:
        return horizon
    step, epoch, offset = (found.state[k] for k in ("step", "epoch", "offset"))
    size = plan.global_batch
    if (epoch * horizon.epoch_steps - step) * size + offset == 0:  # every step had this size
        return horizon
    total = cfg.trainer.max_steps
    if total is None:
        rest = n - offset
        left = rest // size + (step_size(n, plan, n - rest % size, cfg.data.drop_last) > 0)
        more = (cfg.trainer.max_epochs - epoch - 1) * horizon.epoch_steps
        total = max(step, step + left + more)
    return replace(horizon, steps=total, from_step=step, from_epoch=epoch + offset / n)
