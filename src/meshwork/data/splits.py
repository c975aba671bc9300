"""What a data target returns: `Splits`, and `subset`, some of a data set's samples."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwork.config import ConfigError


@dataclass(frozen=True)
class Splits:
    """The data sets of a run, and what a model has to know about them.

    train, val, test, predict: objects with `__len__` and `__getitem__(index)`, which gives a pair
    (input, target) or a dict; None where the data or the mode has none. predict has no labels: its
    targets are the indices. classes: their names by label; empty where there are none. in_chans,
    image_size: of the model's input.
    """

    train: Any = None
    val: Any = None
    test: Any = None
    predict: Any = None
    classes: tuple[str, ...] = ()
    in_chans: int = 3
    image_size: int = 224


@dataclass(frozen=True)
class Subset:
    """The rows (int64 array) of another data set, which lends everything else it has."""

    dataset: Any
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.rows[index])]

    def path(self, index: int) -> str:
        return self.dataset.path(int(self.rows[index]))

    @property
    def draws(self) -> bool:
        return getattr(self.dataset, "draws", True)

    @property
    def left_out(self) -> dict[str, int]:
        return getattr(self.dataset, "left_out", {})


def subset(dataset: Any, n: int | None, seed: int, key: str = "data.num_samples") -> Any:
    """n samples of a data set, drawn by the seed and in their old order; all of them for None.

    Raises ConfigError, with the key, where n is 0 or more than there are.
    """
    if n is None or n == len(dataset):
        return dataset
    if not 0 < n < len(dataset):
        nearest = 1 if n < 1 else len(dataset)
        raise ConfigError(
            f"{key}={n}, but the data set has {len(dataset)} samples: set {key} to 1 to "
            f"{len(dataset)} (nearest valid: {nearest}), or to null for all of them"
        )
    rows = np.random.default_rng(seed).choice(len(dataset), n, replace=False, shuffle=False)
    return Subset(dataset, np.sort(rows))
