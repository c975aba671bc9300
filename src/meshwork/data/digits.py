"""scikit-learn's 1,797 handwritten digits, grey images of 8 x 8 pixels, bundled with it."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from meshwork.config import ConfigError
from meshwork.data.splits import Splits, subset


class Digits:
    """Pairs (PIL image, digit). images: uint8 [n, size, size]; labels: int64 [n]; mode: L, RGB."""

    draws = False

    def __init__(self, images: np.ndarray, labels: np.ndarray, mode: str):
        self.images, self.labels, self.mode = images, labels, mode

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image = Image.fromarray(self.images[index])
        return image if self.mode == "L" else image.convert(self.mode), int(self.labels[index])


def digits(
    image_size: int,
    seed: int = 0,
    num_samples: int | None = None,
    val_samples: int | None = None,
    in_chans: int | None = None,
    split_seed: int = 0,
) -> Splits:
    """80 % of the digits to train on, 20 % for validation.

    The split follows from split_seed (data.args.split_seed), not from the seed of the run: runs of
    several seeds are measured on the same images, and mode=validate never meets trained ones.
    in_chans: 1, or 3 for the same picture in grey RGB; others raise ConfigError.
    """
    if in_chans not in (None, 1, 3):
        raise ConfigError(f"model.in_chans={in_chans}: digits are given with 1 or 3 channels")
    pixels, labels = _read()
    images = np.stack([_resized(image, image_size) for image in pixels])
    order = np.random.default_rng(split_seed).permutation(len(labels))
    cut = round(0.8 * len(labels))
    mode = "RGB" if in_chans == 3 else "L"
    train, val = (Digits(images[rows], labels[rows], mode) for rows in (order[:cut], order[cut:]))
    return Splits(
        train=subset(train, num_samples, seed, "data.num_samples"),
        val=subset(val, val_samples, split_seed, "data.val_samples"),
        classes=tuple("0123456789"),
        in_chans=in_chans or 1,
        image_size=image_size,
    )


def _read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [1797, 8, 8] of 0 to 255, labels int64 [1797]."""
    # The file itself: importing scikit-learn for it takes a second.
    package = find_spec("sklearn")
    if package is None:
        raise ConfigError("data=digits needs scikit-learn: pip install scikit-learn")
    file = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    return (rows[:, :-1] * 255 // 16).astype(np.uint8).reshape(-1, 8, 8), rows[:, -1].copy()


def _resized(image: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
