import io
import re
import time

import pytest

from meshwork.console import Progress, start_table

TRAIN = {
    "step": 50,
    "train/loss": 0.12341,
    "train/lr": 9.8e-4,
    "train/samples_per_s": 12345.2,
    "train/wait": 0.031,
    "train/grad_norm": 1.5,
}
VAL = {"step": 440, "val/loss": 0.05, "val/top1": 0.98611, "val/top5": 1.0, "val/count": 360}


def test_start_table_aligns_wraps_and_keeps_paths_whole():
    path = "/a/very-long/path-that/" + "x" * 90
    table = start_table([("run", "attempt 1"), ("layout", "words " * 40), ("folder", path)])
    lines = table.splitlines()
    assert lines[0] == "run     attempt 1"
    assert all(line.startswith("        words") for line in lines[2:-1])
    assert all(len(line) <= 100 for line in lines[:-1])
    assert lines[-1] == f"folder  {path}"


def test_start_table_keeps_line_breaks_of_a_value():
    assert (
        start_table([("batch", "64\nBatchNorm over 32")]) == "batch  64\n       BatchNorm over 32"
    )


def test_train_line_shows_percents_rates_and_small_numbers(capsys):
    Progress(440, 0, terminal=False).train(TRAIN, epoch=2)
    out = capsys.readouterr().out
    assert out.startswith(
        "step 50/440  epoch 2  loss 0.1234  12,345 samples/s  wait 3.10 %  lr 0.00098  grad 1.5"
    )
    assert out.endswith("eta 0:00:00\n")


def test_parts_of_the_loss_are_shown(capsys):
    Progress(440, 0, terminal=False).train({"step": 1, "train/aux": 0.25}, epoch=0)
    assert "aux 0.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (1e-7, "1e-07"), (0.0, "0"), (1e30, "1e+30")]
)
def test_a_loss_of_any_size_is_readable(value, shown, capsys):
    Progress(440, 0, terminal=False).train({"step": 1, "train/loss": value}, epoch=0)
    assert f"loss {shown}  " in capsys.readouterr().out


def test_validation_line_shows_percents_and_the_count(capsys):
    Progress(440, 0, terminal=False).validation({**VAL, "val/miou": 0.5, "val/rmse": 0.5})
    assert capsys.readouterr().out == (
        "val   step 440  loss 0.05  top1 98.61 %  top5 100.00 %  miou 50.00 %  rmse 0.5"
        "  (360 samples)\n"
    )


def test_each_evaluated_set_has_its_line(capsys):
    Progress(440, 0, terminal=False).validation({**VAL, "val_ema/top1": 0.5})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["val", "val_ema"]


def test_eta_counts_from_the_step_a_resumed_run_starts_at(capsys, monkeypatch):
    progress = Progress(440, 40, terminal=False)
    began = progress.began
    monkeypatch.setattr(time, "monotonic", lambda: began + 10)
    progress.train({**TRAIN, "step": 50}, epoch=0)
    assert "eta 0:06:30\n" in capsys.readouterr().out


def test_bar_is_one_line_with_notes_above_it(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    progress = Progress(440, 0, terminal=True)
    progress.validation(VAL)
    progress.train(TRAIN, epoch=2)
    progress.close()
    progress.close()
    text = screen.getvalue()
    assert "val   step 440" in text and "top1 98.61 %" in text
    last = [line for line in text.splitlines() if "50/440" in line][-1]
    line = r"50/440  eta 0:00:0\d  loss 0.1234  top1 98.61 %  12,345 samples/s  wait 3.10 %"
    assert re.search(line, last), last
