"""From a PIL image to the model's input: timm's transforms with the model's mean, std and sizes."""

import random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import Compose

from meshwork.config import Augment, ConfigError


class Transform(Compose):
    """Steps from a PIL image to a float tensor; `draws` says whether they use random numbers."""

    def __init__(self, steps: list, draws: bool):
        super().__init__(steps)
        self.draws = draws


def train_transform(
    augment: Augment, images: dict[str, Any], image_size: int, in_chans: int
) -> Transform:
    """PIL image to float32 [in_chans, image_size, image_size], augmented as the config says.

    images: the model's mean, std, interpolation and crop_pct (timm.data.resolve_model_data_config).
    Without a random crop the image is fitted as in evaluation. Raises ConfigError for settings that
    timm does not take.
    """
    from timm.data import create_transform

    if augment.color_jitter and augment.auto_augment and "3a" not in augment.auto_augment:
        raise ConfigError(
            f"data.augment.color_jitter={augment.color_jitter} has no effect beside "
            f"data.augment.auto_augment={augment.auto_augment}: set one of them to null"
        )
    try:
        first, policy, last = create_transform(
            image_size,
            is_training=True,
            separate=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter or None,
            auto_augment=augment.auto_augment,
            interpolation=images["interpolation"],
            mean=channels(images["mean"], 3),
            std=channels(images["std"], 3),
            re_prob=augment.re_prob,
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"data.augment.auto_augment={augment.auto_augment}: timm knows no such policy "
            f"({error}); expected rand-m9-mstd0.5, augmix-m5-w4, 3a, original or their kin"
        ) from error
    crop, *flips = first.transforms
    steps = [crop if augment.scale else Fit(images, image_size), *flips]
    if augment.shift:
        steps.append(Shift(augment.shift))
    if policy.transforms:
        steps += [_rgb, *policy.transforms]  # they know no other mode
    steps += [Normalize(images, in_chans), *last.transforms[2:]]
    drawn = (augment.scale, augment.hflip, augment.shift, policy.transforms, augment.re_prob)
    return Transform(steps, draws=any(drawn))


def eval_transform(images: dict[str, Any], image_size: int, in_chans: int) -> Transform:
    """PIL image to float32 [in_chans, image_size, image_size], resized and cropped as by timm."""
    return Transform([Fit(images, image_size), Normalize(images, in_chans)], draws=False)


class Fit:
    """timm's resize and crop of evaluation; an image of the right size is taken as it is."""

    def __init__(self, images: dict[str, Any], image_size: int):
        from timm.data import create_transform

        names = ("interpolation", "crop_pct", "crop_mode")
        given = {name: images[name] for name in names if name in images}
        whole = create_transform(image_size, mean=channels(images["mean"], 3), **given)
        self.size, self.resized = (image_size, image_size), Compose(whole.transforms[:-2])

    def __call__(self, image: Image.Image) -> Image.Image:
        return image if image.size == self.size else self.resized(image)


class Shift:
    """Moves the image by up to `pixels` each way; black comes in."""

    def __init__(self, pixels: int):
        self.pixels = pixels

    def __call__(self, image: Image.Image) -> Image.Image:
        x, y = (random.randint(-self.pixels, self.pixels) for _ in range(2))
        return image.crop((x, y, x + image.width, y + image.height))


class Normalize:
    """PIL image to float32 [in_chans, height, width], (pixel / 255 - mean) / std.

    A mean or std of another length than in_chans counts by its average.
    """

    def __init__(self, images: dict[str, Any], in_chans: int):
        mean, std = (np.array(channels(images[name], in_chans)) for name in ("mean", "std"))
        shape = (in_chans, 1, 1)
        self.factor = torch.from_numpy(1 / (255 * std)).float().reshape(shape)
        self.shift = torch.from_numpy(-mean / std).float().reshape(shape)
        self.mode = {1: "L", 3: "RGB"}.get(in_chans)
        self.in_chans = in_chans

    def __call__(self, image: Image.Image) -> Tensor:
        if self.mode is None:
            raise ConfigError(f"found an image for model.in_chans={self.in_chans}: expected 1 or 3")
        if image.mode != self.mode:
            image = image.convert(self.mode)
        pixels = np.array(image, dtype=np.uint8, ndmin=3)
        pixels = pixels if self.mode == "L" else pixels.transpose(2, 0, 1)
        image = torch.empty(pixels.shape)  # in this order, not in PIL's channels-last
        return torch.addcmul(self.shift, torch.from_numpy(pixels), self.factor, out=image)


def channels(values: tuple[float, ...], n: int) -> tuple[float, ...]:
    return tuple(values) if len(values) == n else (float(np.mean(values)),) * n


def _rgb(image: Image.Image) -> Image.Image:
    return image.convert("RGB")
