import numpy as np
import pytest
import torch
from PIL import Image

from meshwork.config import Augment, ConfigError
from meshwork.data.loader import Samples, Step
from meshwork.data.transforms import eval_transform, train_transform

IMAGENET = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "interpolation": "bicubic",
    "crop_pct": 0.875,
}


def augment(**changes):
    nothing = {"scale": None, "ratio": [0.75, 1.3333], "hflip": 0.0, "shift": 0}
    nothing |= {"color_jitter": None, "auto_augment": None, "re_prob": 0.0}
    return Augment(**(nothing | changes))


def picture(width=48, height=40, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


class Pictures:
    draws = False

    def __init__(self, mode):
        self.image = picture(mode=mode)

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return self.image, index


SETTINGS = {
    "crop": {"scale": [0.08, 1.0]},
    "square crop": {"scale": [0.3, 0.6], "ratio": [1.0, 1.0]},
    "flip": {"hflip": 0.5},
    "shift": {"shift": 3},
    "jitter": {"color_jitter": 0.4},
    "jitter and crop": {"color_jitter": 0.4, "scale": [0.5, 1.0], "hflip": 0.5},
    "randaugment": {"auto_augment": "rand-m9-mstd0.5"},
    "randaugment, plain": {"auto_augment": "rand-m9"},
    "augmix": {"auto_augment": "augmix-m5-w4"},
    "three augment": {"auto_augment": "3a", "color_jitter": 0.3},
    "original": {"auto_augment": "original", "scale": [0.08, 1.0]},
    "erasing": {"re_prob": 0.9},
}


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_augmentation_follows_from_seed_epoch_and_index(settings, in_chans):
    transform = train_transform(augment(**settings), IMAGENET, 32, in_chans)
    assert transform.draws
    samples = Samples(Pictures("L" if in_chans == 1 else "RGB"), transform, 0, train=True)
    first, other = (samples[Step(e, 0, np.arange(24), 24, 24)].inputs[0] for e in (0, 1))
    assert first.shape == (24, in_chans, 32, 32) and first.dtype == torch.float32
    backwards = samples[Step(0, 0, np.arange(24)[::-1].copy(), 24, 24)].inputs[0]
    assert torch.equal(first, backwards.flip(0))
    assert not torch.equal(first, other)
    assert len({image.numpy().tobytes() for image in first}) > 1


def test_without_augmentation_training_sees_what_evaluation_sees():
    train = train_transform(augment(), IMAGENET, 32, 3)
    assert not train.draws
    assert torch.equal(train(picture()), eval_transform(IMAGENET, 32, 3)(picture()))


def test_evaluation_is_timms_own():
    from timm.data import create_transform

    timms = create_transform(32, **IMAGENET)(picture())
    torch.testing.assert_close(eval_transform(IMAGENET, 32, 3)(picture()), timms)


def test_random_crop_is_timms_own():
    import random

    from timm.data import create_transform

    timms = create_transform(32, is_training=True, scale=(0.2, 1.0), color_jitter=None, **IMAGENET)
    ours = train_transform(augment(scale=[0.2, 1.0], hflip=0.5), IMAGENET, 32, 3)
    for seed in range(5):
        found = []
        for transform in (timms, ours):
            random.seed(seed), torch.manual_seed(seed)
            found.append(transform(picture()))
        torch.testing.assert_close(*found)


def test_an_image_of_the_right_size_is_taken_as_it_is():
    image = picture(32, 32)
    expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    assert eval_transform(IMAGENET, 32, 3)(image).is_contiguous()
    mean, std = (torch.tensor(IMAGENET[k]).reshape(3, 1, 1) for k in ("mean", "std"))
    torch.testing.assert_close(eval_transform(IMAGENET, 32, 3)(image), (expected - mean) / std)


def test_one_channel_takes_the_average_of_the_models_mean_and_std():
    found = eval_transform(IMAGENET, 32, 1)(Image.new("L", (32, 32), 51))
    expected = (0.2 - np.mean(IMAGENET["mean"])) / np.mean(IMAGENET["std"])
    torch.testing.assert_close(found, torch.full((1, 32, 32), expected, dtype=torch.float32))


def test_grey_images_become_three_channels_where_the_model_has_three():
    found = eval_transform({**IMAGENET, "mean": (0.5,) * 3, "std": (0.5,) * 3}, 32, 3)(
        picture(mode="L")
    )
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


def test_a_shift_moves_the_picture_by_whole_pixels_and_black_comes_in():
    image = Image.new("L", (5, 5), 0)
    image.putpixel((2, 2), 255)
    plain = {**IMAGENET, "mean": (0.0,), "std": (1.0,)}
    samples = Samples(Pictures("L"), train_transform(augment(shift=1), plain, 5, 1), 0, True)
    samples.dataset.image = image
    found = samples[Step(0, 0, np.arange(100), 100, 100)].inputs[0]
    assert found.sum(dim=(1, 2, 3)).tolist() == [1.0] * 100
    where = {divmod(int(k), 5) for k in found.flatten(1).argmax(1)}
    assert where == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}


@pytest.mark.parametrize("policy", ["nonsense", "rand-q7"])
def test_a_policy_that_timm_does_not_know_is_refused(policy):
    with pytest.raises(ConfigError, match=f"data.augment.auto_augment={policy}"):
        train_transform(augment(auto_augment=policy), IMAGENET, 32, 3)


def test_jitter_that_timm_would_leave_out_is_refused():
    with pytest.raises(ConfigError, match=r"color_jitter=0\.4 has no effect beside"):
        train_transform(augment(auto_augment="rand-m9", color_jitter=0.4), IMAGENET, 32, 3)


def test_images_are_refused_where_the_model_has_neither_one_channel_nor_three():
    transform = eval_transform(IMAGENET, 32, 4)
    with pytest.raises(ConfigError, match=r"model\.in_chans=4"):
        transform(picture())
