"""What a run prints: a table at its start, then progress: a bar on a terminal, else plain lines.

Metrics come under their names in metrics.jsonl, rates as fractions; percents are made here.
"""

import re
import textwrap
import time
from datetime import timedelta
from typing import Any

WIDTH, BAR = 100, 10
# What matters most comes first: a narrow terminal cuts the end off.
FIRST = ("loss", "top1", "samples_per_s", "wait")
# Metrics known to be shares of one: shown as percents.
SHARES = re.compile(r"^(top\d+|acc|accuracy|error|precision|recall|f1|m?iou|dice)$")


def start_table(rows: list[tuple[str, str]]) -> str:
    """Label and text side by side, wrapped at 100 columns; paths are never broken."""
    left = max((len(label) for label, _ in rows), default=0) + 2
    whole = {"break_long_words": False, "break_on_hyphens": False}
    lines = []
    for label, text in rows:
        for line in text.splitlines():
            start = f"{label:<{left}}"
            lines += textwrap.wrap(
                line, WIDTH, initial_indent=start, subsequent_indent=" " * left, **whole
            )
            label = ""
    return "\n".join(lines)


class Progress:
    """Training and validation as a person follows them.

    total_steps: the run's last step. start_step: steps done before this process began.
    terminal: whether stdout is one; if so one bar stays below all other output until `close`.
    """

    def __init__(self, total_steps: int, start_step: int, terminal: bool):
        self.total, self.start, self.began = total_steps, start_step, time.monotonic()
        self.top1: float | None = None
        self.bar = _bar(total_steps, start_step) if terminal else None

    def train(self, metrics: dict[str, Any], epoch: int) -> None:
        """One logged step: a line, or the bar moved on. metrics holds step and train/..."""
        step, values = metrics["step"], _below("train", metrics)
        if self.bar is not None and self.top1 is not None:
            values["top1"] = self.top1
        order = dict.fromkeys((*FIRST, *values))
        parts = [_part(name, values[name]) for name in order if name in values]
        pace = (time.monotonic() - self.began) / max(1, step - self.start)
        eta = f"eta {timedelta(seconds=round(pace * max(0, self.total - step)))}"
        if self.bar is None:
            start = f"step {step}/{self.total}  epoch {epoch}"
            print("  ".join([start, *parts, eta]), flush=True)
        else:
            text = "  ".join([f"{step}/{self.total}", eta, *parts, f"epoch {epoch}"])
            text = text[: self.bar.console.width - BAR - 2]
            self.bar.update(0, completed=step, text=text, refresh=True)

    def validation(self, metrics: dict[str, Any]) -> None:
        """One line for each set in metrics: val, val_ema, test."""
        names = dict.fromkeys(key.split("/")[0] for key in metrics if "/" in key)
        for name in (n for n in names if n != "train"):
            values = _below(name, metrics)
            count = values.pop("count", None)
            parts = [f"{name:<5} step {metrics['step']}"] if "step" in metrics else [f"{name:<5}"]
            parts += [_part(key, value) for key, value in values.items()]
            parts += [f"({count:,.0f} samples)"] if count is not None else []
            self.note("  ".join(parts))
            self.top1 = values.get("top1", self.top1) if name == "val" else self.top1

    def note(self, text: str) -> None:
        """Print a line; the bar stays whole below it."""
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar where it is; further output follows it. May be called twice."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _bar(total: int, start: int) -> Any:
    """A started rich progress bar of one line, redrawn when told to and at no other time."""
    from rich.progress import BarColumn, Progress, TextColumn

    text = TextColumn("{task.fields[text]}", markup=False)
    bar = Progress(BarColumn(bar_width=BAR), text, auto_refresh=False)
    bar.add_task("", total=total, completed=start, text=f"{start}/{total}")
    bar.start()
    return bar


def _below(name: str, metrics: dict[str, Any]) -> dict[str, Any]:
    return {k.split("/", 1)[1]: v for k, v in metrics.items() if k.startswith(name + "/")}


def _part(name: str, value: Any) -> str:
    """A metric as a line shows it: percents, samples a second, or four digits."""
    if name == "samples_per_s":
        return f"{value:,.0f} samples/s"
    if name == "wait" or SHARES.match(name):
        return f"{name} {100 * value:.2f} %"
    return f"{name.removesuffix('_norm')} {value:.4g}"
