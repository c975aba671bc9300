"""What a run prints: a table at its start, then progress: a bar on a terminal, else plain lines.

Metrics come under their names in metrics.jsonl, rates as fractions; percents are made here.
"""

import re
import textwrap
import time
from typing import Any

WIDTH, BAR = 100, 10
# Metrics known to be shares of one: shown as percents.
SHARES = re.compile(r"^(top\d+|acc|accuracy|error|precision|recall|f1|m?iou|dice)$")


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
        step, parts = metrics["step"], _train_parts(_below("train", metrics))
        count, eta = f"{step}/{self.total}", f"eta {self._eta(step)}"
        if self.bar is None:
            print("  ".join([f"step {count}", f"epoch {epoch}", *parts.values(), eta]), flush=True)
            return
        # What matters most comes first: a narrow terminal cuts the end off.
        top1 = {} if self.top1 is None else {"top1": f"top1 {_percent(self.top1, 2)}"}
        order = dict.fromkeys(("loss", "top1", "samples_per_s", "wait"), "") | parts | top1
        shown = [count, eta, *order.values(), f"epoch {epoch}"]
        text = "  ".join(filter(None, shown))[: self.bar.console.width - BAR - 2]
        self.bar.update(0, completed=step, text=text, refresh=True)

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

    def _eta(self, step: int) -> str:
        done = step - self.start
        if done <= 0:
            return "?"
        left = (time.monotonic() - self.began) / done * (self.total - step)
        minutes, seconds = divmod(round(max(0.0, left)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _train_parts(values: dict[str, Any]) -> dict[str, str]:
    """What is shown of a logged step, by name, in the order of a line."""
    texts = {
        "loss": lambda v: f"loss {_number(v)}",
        "lr": lambda v: f"lr {_number(v)}",
        "samples_per_s": lambda v: f"{v:,.0f} samples/s",
        "wait": lambda v: f"wait {_percent(v, 0)}",
        "grad_norm": lambda v: f"grad {_number(v)}",
    }
    known = {name: text(values[name]) for name, text in texts.items() if name in values}
    return known | {k: f"{k} {_value(k, v)}" for k, v in values.items() if k not in known}


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
