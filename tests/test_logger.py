import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meshwork.config import ConfigError
from meshwork.logger import JsonlLogger, Loggers, TensorBoardLogger


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_keeps_all_digits_and_writes_each_line_at_once(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log({"train/loss": 0.1 + 0.2, "epoch": 0}, 1)
    assert lines(tmp_path) == [{"step": 1, "train/loss": 0.30000000000000004, "epoch": 0}]
    logger.log({"train/loss": np.float64(0.5)}, 2)
    assert lines(tmp_path)[1] == {"step": 2, "train/loss": 0.5}


def test_jsonl_writes_null_for_what_json_does_not_know(tmp_path):
    JsonlLogger(tmp_path).log({"a": float("nan"), "b": -float("inf"), "c": 1}, 1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "a": null, "b": null, "c": 1}\n'


def test_jsonl_goes_on_after_the_half_line_of_a_killed_attempt(tmp_path):
    whole = "".join(f'{{"step": {i}}}\n' for i in range(1000))
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 1000, "train/lo')
    JsonlLogger(tmp_path).log({"x": 1}, 1000)
    found = lines(tmp_path)
    assert len(found) == 1001 and found[-1] == {"step": 1000, "x": 1}


class Broken:
    def __init__(self):
        self.calls = 0

    def log(self, metrics, step):
        self.calls += 1
        raise OSError("disk full")


def test_a_logger_that_fails_is_said_once_and_left_out(tmp_path):
    said, broken = [], Broken()
    loggers = Loggers([broken, JsonlLogger(tmp_path)], said.append)
    for step in (1, 2, 3):
        loggers.log({"x": step}, step)
    loggers.image("picture", Image.new("L", (2, 2)), 3)
    loggers.finish(0)
    assert broken.calls == 1 and [line["x"] for line in lines(tmp_path)] == [1, 2, 3]
    assert said == ["Broken failed in log (disk full): left out from here on"]


def test_tensorboard_writes_metrics_that_are_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, {"seed": 1})
    for step in (1, 2):
        logger.log({"train/loss": step / 4, "epoch": 0}, step)
    logger.image("batch", Image.new("L", (4, 4)), 2)
    logger.table("t", ["a"], [[1]], 2)
    logger.finish(0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["images"] == ["batch"]
    assert logger.commands() == [f"tensorboard --logdir {tmp_path}/tensorboard"]


def test_a_missing_tensorboard_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoardLogger(tmp_path, {})
