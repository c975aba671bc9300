"""Models, data sets and tasks small enough to compute by hand: targets of tests alone.

`allow` lets configs name them: `before=toys.allow` in a process of its own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from meshwork import build
from meshwork.batch import Batch
from meshwork.data import Splits


def allow(rank: int = 0) -> None:
    """Put this module on the list of packages that a config may name."""
    if "toys" not in build.ALLOWED:
        build.ALLOWED += ("toys",)


# ---- models --------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two layers on flattened images."""

    def __init__(self, num_classes: int, in_chans: int, img_size: int, hidden: int = 16):
        super().__init__()
        self.first = nn.Linear(in_chans * img_size**2, hidden)
        self.second = nn.Linear(hidden, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(image.flatten(1))))


class NormNet(nn.Module):
    """A convolution with BatchNorm, for images of 8 pixels."""

    def __init__(self, num_classes: int, in_chans: int, momentum: float | None = 0.1):
        super().__init__()
        self.conv = nn.Conv2d(in_chans, 6, 3, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(6, momentum=momentum)
        self.head = nn.Linear(6, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(image))).mean((2, 3)))


class Dropped(Mlp):
    """The two layers with dropout between them."""

    def forward(self, image: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.first(image.flatten(1))), 0.5, self.training)
        return self.second(hidden)


class Unused(Mlp):
    """Has an auxiliary head that no loss sees."""

    def __init__(self, num_classes: int, in_chans: int, img_size: int):
        super().__init__(num_classes, in_chans, img_size)
        self.aux = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 2))


class TwoInputs(nn.Module):
    """Called with an image [n, 4] and a mask [n, 4]; gives class scores and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 3)
        self.size = nn.Linear(4, 1)

    def forward(self, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
        seen = image * mask
        return {"scores": self.scores(seen), "size": self.size(seen)[:, 0]}


class NoMemory(Mlp):
    """Runs out of memory in its second step."""

    calls = 0

    def __init__(self, num_classes: int, in_chans: int, img_size: int, error: str = "cpu"):
        super().__init__(num_classes, in_chans, img_size)
        self.error = error

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        if self.training and self.calls > 1:
            if self.error == "gpu":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            text = "can't allocate memory: you tried to allocate 9 bytes."
            raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: {text}")
        return super().forward(image)


class Residual(nn.Module):
    """A block: a norm, two layers, and what came in. hungry: runs out of memory in training."""

    def __init__(self, width: int, hungry: bool = False):
        super().__init__()
        self.norm, self.hungry = nn.LayerNorm(width), hungry
        self.first, self.second = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.hungry and self.training and type(x) is Tensor:  # not where shapes alone are run
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes.")
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Woven(nn.Module):
    """Four blocks of which two share a weight, and the root reads another's and its head's."""

    def __init__(self, num_classes: int, in_chans: int, img_size: int, hungry: bool = False):
        super().__init__()
        self.stem = nn.Linear(in_chans * img_size**2, 16)
        self.blocks = nn.ModuleList([Residual(16, hungry and i == 2) for i in range(4)])
        self.head = nn.Linear(16, num_classes)
        self.blocks[1].first.weight = self.blocks[0].first.weight

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x) + F.linear(x, self.head.weight * self.blocks[3].second.weight.mean())


# ---- data ----------------------------------------------------------------------------------------


class Rows:
    """Dicts with an image, a mask and nested targets, drawn from the index."""

    draws = False

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict:
        g = torch.Generator().manual_seed(index)
        return {
            "image": torch.randn(4, generator=g),
            "label": {"class": index % 3, "more": {"size": torch.randn((), generator=g)}},
            "mask": (torch.rand(4, generator=g) < 0.7).float(),
            "valid": index % 4,
        }


def rows(num_samples: int | None = None, val_samples: int | None = None) -> Splits:
    """No classes and no images: the model is one of a fork's own."""
    return Splits(train=Rows(num_samples or 90), val=Rows(val_samples or 21), in_chans=4)


class Noise:
    """Images [1, size, size] and labels that follow from the index."""

    draws = False

    def __init__(self, n: int, size: int, classes: int = 3):
        self.n, self.size, self.classes = n, size, classes

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        g = torch.Generator().manual_seed(index)
        return torch.randn(1, self.size, self.size, generator=g), index % self.classes


def noise(
    image_size: int, num_samples: int | None = None, val_samples: int | None = None
) -> Splits:
    """Float images of three classes."""
    n, n_val = num_samples or 96, val_samples or 21
    train, val = Noise(n, image_size), Noise(n_val, image_size)
    return Splits(train, val, classes=("a", "b", "c"), in_chans=1, image_size=image_size)


# ---- tasks ---------------------------------------------------------------------------------------


class ClassAndSize:
    """Cross-entropy and a squared error, summed over `valid` things of a sample."""

    inputs = ("image", "mask")
    objective = ("val/error", "min")

    def weight(self, batch: Batch) -> Tensor:
        return batch.target["valid"]

    def loss(self, output: dict, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        label, valid = batch.target["label"], batch.target["valid"]
        entropy = F.cross_entropy(output["scores"], label["class"], reduction="none")
        error = (output["size"] - label["more"]["size"]) ** 2
        return (entropy + error) * valid, {"entropy": entropy * valid, "error": error * valid}

    def metrics(self, output: dict, batch: Batch) -> dict[str, Tensor]:
        label = batch.target["label"]
        cell = label["class"] * 3 + output["scores"].argmax(1)
        error = (output["size"] - label["more"]["size"]) ** 2
        return {"table": torch.bincount(cell, minlength=9).reshape(3, 3), "error": error.sum()}

    def summarize(self, totals: dict[str, Tensor]) -> dict[str, float]:
        n = totals["count"]
        return {
            "loss": float(totals["loss"] / totals["weight"]),
            "error": float(totals["error"] / n),
            "accuracy": float(totals["table"].trace() / n),
            "count": int(n),
        }


class Watched(ClassAndSize):
    """The same with a frozen helper, and hooks that note what they see."""

    def __init__(self, teacher: nn.Module | None = None):
        self.helpers = {"teacher": teacher or nn.Linear(4, 3)}
        self.steps: list[tuple[int, int]] = []

    def loss(self, output: dict, batch: Batch) -> Tensor:
        taught = self.helpers["teacher"](batch.inputs[0]).softmax(1)
        return -(taught * output["scores"].log_softmax(1)).sum(1) * batch.target["valid"]

    def after_step(self, model: nn.Module, position: Any) -> None:
        self.steps.append((position.step, position.samples))

    def on_validation(self, batch: Batch, output: dict, logger: Any) -> None:
        logger.image("mask", Image.new("L", (4, len(batch))), 0)


class WrongShape:
    """Returns the mean where a value a sample is asked for."""

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch.target)


class Contrast:
    """Each sample against all others of the batch: its class is what it should be like."""

    per_sample = False

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        features = F.normalize(output, dim=1)
        everyone = self.gather(features)
        return -(features @ everyone.T / 0.5).log_softmax(1).amax(1)
