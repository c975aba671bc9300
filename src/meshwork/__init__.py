"""A research template for training any timm model under any parallel layout."""

from typing import Any

__version__ = "0.1.0"


def load(run: Any, which: str = "last") -> tuple[Any, Any, tuple[str, ...]]:
    """A trained model in eval mode on the CPU, its evaluation transform (PIL image to float32
    [in_chans, image_size, image_size]) and the names of its classes.

    run: a run folder, which="last" or "best" of its checkpoints; or one checkpoints/step_<n>. The
    data set is not needed. Weights are the average (EMA) where one was kept. Raises ConfigError.
    """
    from meshwork import trained  # torch is imported where a model is wanted

    found = trained.read(run, which)
    return found.model, found.transform, found.classes
