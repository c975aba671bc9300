"""A trained model, from what its run folder keeps: nothing of the data set is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwork import build, config
from meshwork import checkpoint_files as files
from meshwork.checkpoint import read_model
from meshwork.config import ConfigError, Model
from meshwork.data.splits import Splits
from meshwork.data.transforms import eval_transform
from meshwork.rundir import read_json

EXPECTED = "expected a run folder as outputs/<start>_<id>, or one of its checkpoints/step_<n>"


@dataclass(frozen=True)
class Trained:
    """A model and what it needs to be used.

    model: in eval mode, on the CPU, float32. transform: PIL image to float32 [in_chans, image_size,
    image_size]. images: mean, std, interpolation and crop of it. settings: the config's model
    group. path: of the checkpoint. averaged: the weights are the average (EMA).
    """

    model: nn.Module
    transform: Callable
    classes: tuple[str, ...]
    in_chans: int
    image_size: int
    images: dict[str, Any]
    settings: Model
    path: Path
    averaged: bool


def read(run: str | Path, which: str = "last") -> Trained:
    """The model of a run folder (its `last` or `best` checkpoint) or of one checkpoint.

    The architecture is that of the run's config.yaml, built by build.py's rules alone; files hold
    tensors and plain values, so that none of them can run code. Raises ConfigError.
    """
    path = find(run, which)
    if (why := files.problem(path)) is not None:
        raise ConfigError(f"{why}: choose another checkpoint of {path.parent}")
    state = files.read_state(path)
    settings = config.saved_model(_config_file(path, state))
    try:
        classes = tuple(str(name) for name in state["classes"])
        in_chans, image_size = int(state["in_chans"]), int(state["image_size"])
        images = dict(state["images"])
        transform = eval_transform(images, image_size, in_chans)
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(
            f"{path / files.STATE} does not say what images the model takes ({type(e).__name__}: "
            f"{e}): it is of an older version; go on with the run for a step, which saves it anew"
        ) from e
    data = Splits(classes=classes, in_chans=in_chans, image_size=image_size)
    with torch.random.fork_rng(devices=[]):  # a notebook's random numbers stay as they are
        model = build.bare_model(settings, data, pretrained=False)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={settings._target_} gives no torch.nn.Module")
    averages = read_model(path, "ema")
    try:
        model.load_state_dict(read_model(path))
        model.load_state_dict(averages, strict=False)  # last: of tied weights they name one
    except RuntimeError as e:
        raise ConfigError(
            f"{path} does not fit the model of its run's config ({' '.join(str(e).split())[:300]})"
        ) from e
    facts = classes, in_chans, image_size, images, settings, path, bool(averages)
    return Trained(model.eval(), transform, *facts)


def find(run: str | Path, which: str = "last") -> Path:
    """The checkpoint that a path means. Raises ConfigError where there is none."""
    if which not in ("last", "best"):
        raise ConfigError(f"which={which}: expected last or best")
    path = Path(config.absolute(str(run)))
    if not path.is_dir():
        state = "is no folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {state}: {EXPECTED}")
    if which == "best" and (path / files.MARKER).exists():
        raise ConfigError(f"which=best: {path} is one checkpoint; give the run folder, or no which")
    found = files.newest(path) if which == "last" else files.best(path) or _best_of_result(path)
    if found is None:
        missing = "complete checkpoint" if which == "last" else "checkpoint of a best validation"
        raise ConfigError(f"{path} holds no {missing}: {EXPECTED}")
    return found


def _best_of_result(run: Path) -> Path | None:
    """The best checkpoint by the run's result.json, wherever the folder has been moved since."""
    named = (read_json(run / "result.json").get("checkpoint") or {}).get("best")
    found = run / "checkpoints" / Path(named or "-").name
    return found if (found / files.MARKER).exists() else None


def _config_file(path: Path, state: dict) -> Path:
    """The config of the attempt that saved a checkpoint."""
    run = path.parent.parent
    later = run / f"config.attempt_{state.get('attempt')}.yaml"
    file = later if later.exists() else run / "config.yaml"
    if not file.exists():
        raise ConfigError(
            f"{file} does not exist: a checkpoint is loaded with the config of its run, two "
            "folders up; copy the run folder with its checkpoints/ as a whole"
        )
    return file
