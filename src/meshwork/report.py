"""What rank 0 tells of a run: the start table, lines, pictures, result and the commands to type
next.

Every rank holds a Report; on all but rank 0 it is silent.
"""

import logging
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from meshwork.batch import Batch
from meshwork.build import image_facts
from meshwork.checkpoint import Position
from meshwork.config import Config, ConfigError
from meshwork.console import Progress, start_table
from meshwork.distributed import World
from meshwork.evaluate import Result
from meshwork.logger import JsonlLogger, Loggers
from meshwork.provenance import redact
from meshwork.rundir import RunDir, write_json

log = logging.getLogger("meshwork")
TORCHRUN_PATIENCE_S = 25  # of the 30 s after which torchrun kills what it has asked to stop


class Report:
    """Lines, pictures and files of one run.

    data: as build_data returned it. model: for the mean and std of its inputs. objective: metric
    and mode (max or min) that best means.
    """

    def __init__(
        self,
        cfg: Config,
        run: RunDir,
        world: World,
        loggers: list,
        data: Any,
        model: Any,
        task: Any,
    ):
        self.cfg, self.run, self.world = cfg, run, world
        self.images, self.classes = image_facts(model), data.classes
        own = getattr(task, "objective", ("val/loss", "min"))
        self.objective = (cfg.objective.metric or own[0], cfg.objective.mode or own[1])
        jsonl = [JsonlLogger(run.path)] if world.is_main else []
        self.loggers = Loggers([*jsonl, *loggers], self.note)
        self.progress: Progress | None = None
        self.began, self.status_time = time.time(), 0.0
        self.bad: set[str] = set()
        self.longest: dict[str, float] = {}

    def table(self, rows: list[tuple[str, str]]) -> None:
        """The start table."""
        if self.world.is_main:
            text = start_table(rows)
            print(text + "\n", flush=True)
            log.info("%s", text)

    def logging_row(self) -> tuple[str, str]:
        """The row of the start table that says where metrics go."""
        others = [
            f"{type(logger).__name__.removesuffix('Logger')} {getattr(logger, 'mode', '')}".strip()
            for logger in self.loggers.loggers[1:]
        ]
        return "logging", ", ".join(["metrics.jsonl", *others])

    def begin(self, total: int, start: int) -> None:
        """Start the progress line of a run of `total` steps, `start` of them done."""
        if self.world.is_main:
            self.progress = Progress(total, start, sys.stdout.isatty())

    def note(self, text: str) -> None:
        """One line for the reader, kept in the log as well."""
        if self.world.is_main:
            log.info(text)
            (self.progress.note if self.progress else print)(text)

    def _line(self, metrics: dict[str, float], position: Position) -> dict:
        facts = {"step": position.step, "samples": position.samples, "epoch": position.epoch}
        return {**facts, "time": time.time(), "attempt": self.run.attempt, **metrics}

    def train_line(self, metrics: dict[str, float], position: Position) -> None:
        if self.world.is_main:
            line = self._line(metrics, position)
            self.loggers.log(line, position.step)
            self.progress.train(line, position.epoch)
            if time.time() > self.status_time + 1:
                self.status_time = time.time()
                self.run.status("running", step=position.step, step_time=self.status_time)

    def validation_line(self, result: Result, position: Position) -> None:
        if self.world.is_main and result.metrics:
            line = self._line(result.metrics, position)
            self.loggers.log(line, position.step)
            (self.progress or Progress(position.step, 0, False)).validation(line)
            self._pictures(result, position.step)

    def _pictures(self, result: Result, step: int) -> None:
        """Confusion matrix and worst samples, where the evaluation gathered them."""
        if not result.worst:
            return
        from meshwork import pictures

        names = self.classes
        matrix = result.totals.get("confusion")
        if matrix is not None and names:
            self._picture("confusion", pictures.confusion(matrix.long().numpy(), list(names)), step)
        name = (lambda i: names[i]) if names else str
        shown = [
            (
                pictures.picture(image, self.images["mean"], self.images["std"]),
                name(true),
                name(guess),
                loss,
            )
            for loss, _, image, true, guess in result.worst
        ]
        self._picture("worst", pictures.worst(shown), step)

    def _picture(self, name: str, image: Any, step: int) -> None:
        if image is not None:
            image.save(self.run.path / f"{name}.png")
            self.loggers.image(name, image, step)

    def batch_picture(self, batch: Batch) -> None:
        """batch.png: the first training batch as the model sees it."""
        if not self.world.is_main or not torch.is_tensor(batch.inputs[0]):
            return
        from meshwork import pictures

        images, labels = batch.inputs[0].float().cpu(), None
        if torch.is_tensor(batch.target) and batch.target.ndim == 1 and self.classes:
            labels = [self.classes[i] for i in batch.target.tolist()]
        grid = pictures.batch_grid(images, self.images["mean"], self.images["std"], labels)
        self._picture("batch", grid, 0)

    def bad_images(self, bad: list | tuple) -> None:
        """Say and count images that could not be read. Raises ConfigError above
        data.max_bad_images."""
        new = [(path, reason) for path, reason in bad if path not in self.bad]
        for path, reason in new:
            self.bad.add(path)
            log.warning("rank %d skips %s (%s)", self.world.ranks.rank, path, reason)
            with open(
                self.run.path / "logs" / f"bad_images.rank{self.world.ranks.rank}.txt", "a"
            ) as f:
                f.write(f"{path}\t{reason}\n")
        if new:
            self.note(f"skipped {new[0][0]} ({new[0][1]}); {len(self.bad)} so far, listed in logs/")
        if len(self.bad) > self.cfg.data.max_bad_images:
            raise ConfigError(
                f"{len(self.bad)} images could not be read, more than data.max_bad_images="
                f"{self.cfg.data.max_bad_images}; the last is {bad[-1][0]} ({bad[-1][1]}): "
                "look at logs/bad_images*, mend the data (python scripts/scan.py ROOT), or raise "
                "the limit"
            )

    def took(self, what: str, seconds: float, first: bool = False) -> None:
        """Keep the longest step, but for the first, and the longest save: how long a request to
        stop takes."""
        if not first:
            self.longest[what] = max(self.longest.get(what, 0.0), seconds)

    def saved(self, path: Path | None) -> None:
        if self.world.is_main and path is not None:
            log.info("saved %s", path)
            self.run.status("running", checkpoint=str(path))

    def profiler(self, folder: Path) -> Any:
        """A running torch profiler that writes steps 5 to 10 into `folder`/profile."""
        from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

        place, cuda = folder / "profile", self.world.device.type == "cuda"
        found = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda],
            schedule=schedule(wait=3, warmup=1, active=6, repeat=1),
            on_trace_ready=tensorboard_trace_handler(str(place), f"rank{self.world.ranks.rank}"),
            record_shapes=True,
        )
        found.start()
        self.note(f"profiling steps 5 to 10 into {place}")
        return found

    def finish(self, exit_code: int) -> None:
        """Close the progress line and every logger."""
        if self.progress:
            self.progress.close()
        if self.world.is_main:
            self.loggers.finish(exit_code)

    def result(self, outcome: Any, overrides: list[str], reason: str | None) -> float | None:
        """Write result.json, print the last lines and what to type next; returns the objective.

        reason: what asked this rank to stop, where something did.
        """
        metric, mode = self.objective
        value = outcome.best[metric] if outcome.best else outcome.final.get(metric)
        if not self.world.is_main:
            return value
        trains = self.cfg.mode == "train"
        sliced = trains and outcome.position.step == self.cfg.trainer.stop_at_step
        state = "stopped" if sliced or outcome.stopped else "finished"
        best = self.run.checkpoints / f"step_{outcome.best['step']}" if outcome.best else None
        found = {
            "state": state,
            "step": outcome.position.step,
            "samples": outcome.position.samples,
            "final": outcome.final,
            "best": outcome.best,
            "objective": {"metric": metric, "mode": mode, "value": value},
            "checkpoint": {
                "last": str(outcome.checkpoint) if outcome.checkpoint else None,
                "best": str(best) if best and best.exists() else None,
            },
            "wall_s": time.time() - self.began,
            "attempts": self.run.attempt,
            "overrides": [redact(o) for o in overrides],
        }
        looks = not trains and self.run.attempt > 1  # at a run that has a result of its own
        name = f"result_{self.cfg.mode}.json" if looks else "result.json"
        write_json(self.run.path / name, found)
        if not looks:
            why = {"reason": reason or "another rank"} if outcome.stopped else {}
            self.run.status(state, step=outcome.position.step, **why)
        if self.progress:
            self.progress.close()
        rows = self._last_rows(found, reason if outcome.stopped else None)
        print(f"\n{start_table(rows)}\n", flush=True)
        for label, command in self._next_commands(found):
            print(f"{label:<10}{command}", flush=True)
        return value

    def _last_rows(self, found: dict, reason: str | None) -> list[tuple[str, str]]:
        """The end of a run: where it stands, last and best metrics."""

        def shown(metrics: dict) -> str:
            return "  ".join(f"{k} {v:.4g}" for k, v in metrics.items())

        by = f", asked by {reason}" if reason else ""
        rows = [(found["state"], f"step {found['step']}, {found['wall_s']:.1f} s{by}")]
        rows += [("last", shown(found["final"]))] if found["final"] else []
        rows += [("best", shown(found["best"]))] if found["best"] else []
        if "save" in self.longest:
            rows.append(("grace", self._grace()))
        return [*rows, ("folder", str(self.run.path))]

    def _grace(self) -> str:
        """How long a request to stop takes."""
        step, save = self.longest.get("step", 0.0), self.longest["save"]
        text = f"asked to stop it leaves in {step + save:.1f} s: longest step {step:.2f} s, "
        text += f"longest save {save:.2f} s"
        if step + save > TORCHRUN_PATIENCE_S:
            text += f": torchrun --shutdown-timeout={math.ceil(2 * (step + save))}"
        return text

    def _next_commands(self, found: dict) -> list[tuple[str, str]]:
        """What a person types next, with real paths, each on one line to be copied."""
        commands = [
            ("sync" if " sync " in command else "logs", command)
            for command in self.loggers.commands()
        ]
        if self.cfg.mode != "train" or found["checkpoint"]["last"] is None:
            return commands
        start, reopen = launch_command(self.world), f"run.reopen={short(self.run.path)}"
        more = [reopen]
        if found["state"] == "finished":
            key = "max_steps" if self.cfg.trainer.max_steps else "max_epochs"
            more.append(f"trainer.{key}={2 * getattr(self.cfg.trainer, key)}")
        best = ["checkpoint.resume=best"] if found["checkpoint"]["best"] else []
        check = [reopen, "mode=validate", *best]
        rows = (("go on", more), ("validate", check))
        return [*commands, *((label, f"{start} {shlex.join(words)}") for label, words in rows)]


def short(path: Any) -> str:
    """A path relative to the working directory where it lies below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def launch_command(world: World) -> str:
    """How this job was started, as a person types it."""
    script = shlex.quote(short(sys.argv[0]))
    if world.ranks.world_size == 1:
        return f"python {script}"
    n = world.ranks.local_world_size
    return f"torchrun --standalone --nproc-per-node={n} {script}"
