"""Random images that carry their class: for benchmarks and tests, without files or memory."""

import numpy as np
import torch
from PIL import Image

from meshwork.data.order import mixed
from meshwork.data.splits import Splits

CELLS = 8  # an image is so many coloured cells a side


class Synthetic:
    """Pairs (image, class) made from (seed, index): cells of colour, half the class's, half noise.

    The image is a PIL image, or a float tensor [in_chans, size, size] of -1 to 1 where in_chans is
    neither 1 nor 3. first: index of the first sample, so that two sets of one seed share no sample.
    """

    draws = False

    def __init__(self, n: int, first: int, num_classes: int, in_chans: int, size: int, seed: int):
        self.n, self.first, self.in_chans, self.size = n, first, in_chans, size
        rng, shape = np.random.default_rng(seed), (CELLS, CELLS, in_chans)
        self.classes = rng.integers(0, 128, (num_classes, *shape), dtype=np.uint8)
        self.noise = rng.integers(0, 128, 2**18, dtype=np.uint8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Image.Image | torch.Tensor, int]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        number = np.array([self.first + index], np.uint64)
        pattern = self.classes[label := (self.first + index) % len(self.classes)]
        start = int(mixed(number)[0] % np.uint64(len(self.noise) - pattern.size))
        cells = pattern + self.noise[start : start + pattern.size].reshape(pattern.shape)
        if self.in_chans in (1, 3):
            image = Image.fromarray(cells[..., 0] if self.in_chans == 1 else cells)
            return image.resize((self.size, self.size), Image.Resampling.NEAREST), label
        rows = torch.arange(self.size) * CELLS // self.size
        return torch.from_numpy(cells).permute(2, 0, 1)[:, rows][:, :, rows] / 127.5 - 1, label


def synthetic(
    image_size: int,
    seed: int = 0,
    num_samples: int | None = None,
    val_samples: int | None = None,
    in_chans: int | None = None,
    num_classes: int = 10,
) -> Splits:
    """num_samples (null: 1,024) images to train on and val_samples (null: 256) for validation."""
    n, n_val = num_samples or 1024, val_samples or 256
    shape = num_classes, in_chans or 3, image_size
    return Splits(
        train=Synthetic(n, 0, *shape, seed),
        val=Synthetic(n_val, n, *shape, seed),
        test=None,
        classes=tuple(f"class {k}" for k in range(num_classes)),
        in_chans=in_chans or 3,
        image_size=image_size,
    )
