import numpy as np
import pytest
import torch

from meshwork.batch import BatchPlan
from meshwork.config import Augment, ConfigError
from meshwork.data import digits, subset, synthetic
from meshwork.data.loader import Samples, train_steps
from meshwork.data.transforms import eval_transform, train_transform


def pixels(dataset):
    return [np.asarray(dataset[i][0]).tobytes() for i in range(len(dataset))]


def labels(dataset):
    return np.bincount([dataset[i][1] for i in range(len(dataset))], minlength=10)


def test_four_fifths_of_the_digits_are_trained_on_and_one_fifth_is_validated():
    from sklearn.datasets import load_digits

    data = digits(image_size=8)
    assert (len(data.train), len(data.val), len(data.classes)) == (1438, 359, 10)
    assert (data.in_chans, data.image_size) == (1, 8)
    all_labels = labels(data.train) + labels(data.val)
    assert all_labels.tolist() == np.bincount(load_digits().target).tolist()
    given = sorted((image * 255 // 16).astype(np.uint8).tobytes() for image in load_digits().images)
    assert sorted(pixels(data.train) + pixels(data.val)) == given


def test_the_split_follows_from_split_seed_and_not_from_the_seed_of_the_run():
    first, second = digits(8, seed=0), digits(8, seed=1)
    assert pixels(first.val) == pixels(second.val)
    assert pixels(first.val) != pixels(digits(8, split_seed=1).val)


def test_digits_come_in_the_size_and_channels_asked_for():
    image, label = digits(32, in_chans=3).train[0]
    assert (image.size, image.mode) == ((32, 32), "RGB") and label in range(10)
    assert digits(28).train[0][0].size == (28, 28)
    with pytest.raises(ConfigError, match=r"model\.in_chans=2"):
        digits(32, in_chans=2)


def test_a_subset_is_drawn_by_the_seed_and_its_size_is_checked():
    data = digits(8)
    some = subset(data.train, 50, seed=3)
    assert len(some) == 50 and set(pixels(some)) <= set(pixels(data.train))
    assert pixels(some) == pixels(subset(data.train, 50, seed=3))
    assert pixels(some) != pixels(subset(data.train, 50, seed=4))
    assert subset(data.train, None, 0) is data.train
    with pytest.raises(ConfigError, match=r"data.num_samples=0.*nearest valid: 1\)"):
        digits(8, num_samples=0)
    with pytest.raises(ConfigError, match=r"data.val_samples=360.*nearest valid: 359\)"):
        digits(8, val_samples=360)


def test_synthetic_images_follow_from_seed_and_index_and_train_and_val_differ():
    data = synthetic(16, seed=0, num_samples=200, val_samples=100, num_classes=4)
    again, other = (synthetic(16, seed=s, num_samples=200, num_classes=4) for s in (0, 1))
    assert (len(data.train), len(data.val), len(data.classes), data.in_chans) == (200, 100, 4, 3)
    assert pixels(data.train) == pixels(again.train) != pixels(other.train)
    assert len(set(pixels(data.train) + pixels(data.val))) == 300


def test_two_million_synthetic_samples_take_no_memory():
    data = synthetic(32, num_samples=2_000_000)
    held = sum(a.nbytes for a in vars(data.train).values() if isinstance(a, np.ndarray))
    assert len(data.train) == 2_000_000 and held < 2**20
    assert data.train[1_999_999][0].size == (32, 32)


@pytest.mark.parametrize("in_chans", [1, 3, 4])
def test_synthetic_images_carry_their_class(in_chans):
    data = synthetic(16, num_samples=400, val_samples=100, in_chans=in_chans)
    assert data.in_chans == in_chans
    view = eval_transform({"mean": (0.5,), "std": (0.5,), "interpolation": "bicubic"}, 16, in_chans)

    def matrix(dataset):
        items = [dataset[i] for i in range(len(dataset))]
        images = [x if torch.is_tensor(x) else view(x) for x, _ in items]
        return torch.stack(images).flatten(1), torch.tensor([label for _, label in items])

    x, y = matrix(data.train)
    centres = torch.stack([x[y == k].mean(0) for k in range(10)])
    x, y = matrix(data.val)
    assert (torch.cdist(x, centres).argmin(1) == y).float().mean() > 0.95


def test_digits_batches_are_those_of_the_seed():
    images = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "crop_pct": 0.9}
    augment = Augment(None, [0.75, 1.3333], 0.0, 2, None, None, 0.0)
    transform = train_transform(augment, images, 32, 1)
    steps = train_steps(1438, BatchPlan.make(64, 1, None, False), 0, 0, 0, 0, True)
    batch = Samples(digits(32).train, transform, 0, train=True)[next(steps)]
    assert batch.inputs[0].shape == (64, 1, 32, 32) and batch.target.dtype == torch.int64
    assert batch.inputs[0].min().item() == pytest.approx(-1)
    assert batch.inputs[0].max().item() == pytest.approx(1)
