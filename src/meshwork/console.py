"""What a run prints: a table at its start, then progress: a bar on a terminal, else plain lines.

Metrics come under their names in metrics.jsonl, rates as fractions; percents are made here.
"""

import re
import textwrap
import time
from typing import Any

WIDTH = 100
# Metrics known to be shares of one: shown as percents.
SHARES = re.compile(r"^(top\d+|acc|accuracy|error|precision|recall|f1|m?iou|dice)$")
SHOWN = ("loss", "lr", "grad_norm", "samples_per_s", "wait")


def start_table(rows: list[tuple[str, str]]) -> str:
    """Label and text side by side, wrapped at 100 columns; paths are never broken."""
    left = max((len(label) for label, _ in rows), default=0) + 2
    lines = []
    for label, text in rows:
        parts = [
            part
            for line in str(text).splitlines()
            for part in textwrap.wrap(
                line, WIDTH - left, break_long_words=False, break_on_hyphens=False
            )
        ]
        lines += [
            f"{label if i == 0 else '':<{left}}{part}".rstrip()
            for i, part in enumerate(parts or [""])
        ]
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
        count = f"step {step}/{self.total}"
        parts = [f"epoch {epoch}", *self._train_parts(values), f"eta {self._eta(step)}"]
        if self.bar is None:
            print("  ".join([count, *parts]), flush=True)
        else:
            if self.top1 is not None:
                parts.insert(2, f"top1 {_percent(self.top1, 2)}")
            self.bar.update(0, completed=step, text="  ".join([count, *parts]), refresh=True)

    def validation(self, metrics: dict[str, Any]) -> None:
        """One line for each set in metrics: val, val_ema, test."""
        names = dict.fromkeys(key.split("/")[0] for key in metrics if "/" in key)
        for name in (n for n in names if n != "train"):
            values = _below(name, metrics)
            count = values.pop("count", None)
            parts = [f"{name:<5} step {metrics['step']}"] if "step" in metrics else [f"{name:<5}"]
            parts += [f"{key} {_value(key, value)}" for key, value in values.items()]
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

    def _train_parts(self, values: dict[str, Any]) -> list[str]:
        parts = [f"loss {_number(values['loss'])}"] if "loss" in values else []
        if "lr" in values:
            parts.append(f"lr {_number(values['lr'])}")
        if "samples_per_s" in values:
            parts.append(f"{values['samples_per_s']:,.0f} samples/s")
        if "wait" in values:
            parts.append(f"wait {_percent(values['wait'], 0)}")
        if "grad_norm" in values:
            parts.append(f"grad {_number(values['grad_norm'])}")
        return parts + [f"{k} {_value(k, v)}" for k, v in values.items() if k not in SHOWN]

    def _eta(self, step: int) -> str:
        done = step - self.start
        if done <= 0:
            return "?"
        left = (time.monotonic() - self.began) / done * (self.total - step)
        minutes, seconds = divmod(round(max(0.0, left)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _bar(total: int, start: int) -> Any:
    """A started rich progress bar of one line, redrawn when told to and at no other time."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    text = TextColumn(
        "{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
    )
    bar = Progress(BarColumn(bar_width=16), text, auto_refresh=False)
    bar.add_task("", total=total, completed=start, text=f"step {start}/{total}")
    bar.start()
    return bar


def _below(name: str, metrics: dict[str, Any]) -> dict[str, Any]:
    return {k.split("/", 1)[1]: v for k, v in metrics.items() if k.startswith(name + "/")}


def _value(name: str, value: Any) -> str:
    return _percent(value, 2) if SHARES.match(name) else _number(value)


def _percent(share: float, digits: int) -> str:
    return f"{100 * share:.{digits}f} %"


def _number(value: Any) -> str:
    """Four digits after the point, or three digits and an exponent where that says more: 9.8e-4."""
    if not isinstance(value, (int, float)) or value != value or value in (0, float("inf")):
        return str(value)
    if 1e-2 <= abs(value) < 1e5:
        return f"{value:.4f}" if isinstance(value, float) else str(value)
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
