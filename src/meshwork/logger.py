"""Where metrics go besides the console: metrics.jsonl, W&B, TensorBoard.

Built and called on global rank 0 only. A logger is any object with some of the methods
log(metrics, step), image(name, image, step), table(name, columns, rows, step), finish(exit_code)
and commands(); `Loggers` calls those that are there.
"""

import importlib.util
import json
import logging
import math
import shlex
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

from meshwork.config import ConfigError
from meshwork.wandb_logger import WandbLogger, check_wandb, reason

log = logging.getLogger("meshwork")

__all__ = ["JsonlLogger", "Loggers", "TensorBoardLogger", "WandbLogger", "check_wandb"]


class JsonlLogger:
    """One JSON object a line in `folder`/metrics.jsonl, written at once; later attempts append.

    A number that JSON does not know (nan, inf) is null. A half line that a killed attempt left is
    cut off first.
    """

    def __init__(self, folder: Path):
        self.file = open(Path(folder) / "metrics.jsonl", "a+b")
        self.file.seek(0)
        self.file.truncate(self.file.read().rfind(b"\n") + 1)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        line = {"step": step, **{name: _plain(value) for name, value in metrics.items()}}
        self.file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self.file.flush()

    def finish(self, exit_code: int) -> None:
        self.file.close()


def _plain(value: Any) -> Any:
    """A metric as JSON has it: a tensor of one number becomes that number, nan and inf null."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardLogger:
    """Event files in `folder`/tensorboard; a later attempt adds its own. The config is a text."""

    def __init__(self, folder: Path, config: dict):
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "logger=tensorboard, but the package tensorboard is not installed: "
                "pip install tensorboard, or set logger=none"
            )
        from torch.utils.tensorboard import SummaryWriter

        self.place = str(Path(folder) / "tensorboard")
        self.writer = SummaryWriter(self.place)
        self.writer.add_text(
            "config", "```\n" + json.dumps(config, indent=2, default=str) + "\n```"
        )

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def image(self, name: str, image: Any, step: int) -> None:
        import numpy

        pixels = numpy.asarray(image)
        self.writer.add_image(name, pixels, step, dataformats="HWC" if pixels.ndim == 3 else "HW")

    def table(self, name: str, columns: list[str], rows: list[list], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        self.writer.add_text(name, text, step)

    def finish(self, exit_code: int) -> None:
        self.writer.close()

    def commands(self) -> list[str]:
        return [f"tensorboard --logdir {shlex.quote(self.place)}"]


class Loggers:
    """Several loggers as one. One that fails is said once and left out; training goes on.

    warn: takes the line that says so.
    """

    def __init__(self, loggers: list[Any], warn: Callable[[str], None] = log.warning):
        self.loggers, self.warn = list(loggers), warn

    def _each(self, method: str, *args: Any) -> list[Any]:
        answers = []
        for logger in list(self.loggers):
            if not hasattr(logger, method):
                continue
            try:
                answers.append(getattr(logger, method)(*args))
            except Exception as e:
                self.loggers.remove(logger)
                name = type(logger).__name__
                self.warn(f"{name} failed in {method} ({reason(e)}): left out from here on")
        return answers

    log = partialmethod(_each, "log")
    image = partialmethod(_each, "image")
    table = partialmethod(_each, "table")
    finish = partialmethod(_each, "finish")

    def commands(self) -> list[str]:
        return [line for lines in self._each("commands") for line in lines]
