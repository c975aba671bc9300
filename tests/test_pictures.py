import numpy as np
import torch
from PIL import Image

from meshwork import pictures


def test_a_picture_is_the_image_before_it_was_normalised():
    pixels = torch.rand(3, 5, 7)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    normal = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    found = np.asarray(pictures.picture(normal, mean, std))
    assert found.shape == (5, 7, 3)
    assert np.abs(found - 255 * pixels.permute(1, 2, 0).numpy()).max() <= 0.51


def test_one_channel_is_grey_and_of_many_the_first_three_are_shown():
    assert pictures.picture(torch.zeros(1, 4, 4), (0.5,), (0.5,)).mode == "L"
    many = torch.stack([torch.full((4, 4), float(i)) for i in range(5)]) / 4
    found = pictures.picture(many, (0.0,) * 5, (1.0,) * 5)
    assert found.getpixel((0, 0)) == (0, 64, 128)


def test_values_that_are_not_finite_do_not_break_a_picture():
    image = torch.full((1, 2, 2), float("nan"))
    assert pictures.picture(image, (0.5,), (0.5,)).getpixel((0, 0)) == 0


def test_a_batch_grid_shows_every_image_enlarged():
    images = torch.zeros(3, 1, 8, 8)
    images[1] = 1.0
    sheet = pictures.batch_grid(images, (0.0,), (1.0,), ["a", "b", "c" * 500])
    grey = np.asarray(sheet.convert("L"))
    assert (grey == 0).sum() >= 2 * 128 * 128
    # Next to the two black tiles the white one adds nothing dark: it is there as a gap of its size.
    assert sheet.width >= 3 * 128 and sheet.width < 700


def test_a_batch_grid_stops_at_its_limit():
    images = torch.zeros(64, 3, 16, 16)
    few = pictures.batch_grid(images, (0.5,) * 3, (0.5,) * 3, None, limit=8)
    all_of_them = pictures.batch_grid(images, (0.5,) * 3, (0.5,) * 3, None)
    assert all_of_them.width == few.width and all_of_them.height > 3 * 128 > few.height


def test_inputs_that_are_no_images_have_no_batch_grid():
    assert pictures.batch_grid(torch.zeros(4, 10), (0.5,), (0.5,), None) is None
    assert pictures.batch_grid(torch.zeros(4, 1, 2, 2, dtype=torch.long), (0,), (1,), None) is None


def test_a_confusion_matrix_colours_right_blue_and_wrong_red():
    sheet = pictures.confusion(np.array([[9, 1], [0, 0]]), ["cat", "dog" * 100])
    colours = {colour for _, colour in sheet.getcolors(10**6)}
    assert any(b > r + 60 for r, g, b in colours) and any(r > b + 20 for r, g, b in colours)
    assert sheet.width < 600


def test_a_confusion_matrix_ends_at_fifty_classes():
    assert pictures.confusion(np.eye(50, dtype=int), [str(i) for i in range(50)]) is not None
    assert pictures.confusion(np.eye(51, dtype=int), [str(i) for i in range(51)]) is None


def test_the_worst_samples_come_first_and_are_at_most_sixteen():
    samples = [(Image.new("L", (8, 8), i * 10), "1", "7", float(i)) for i in range(20)]
    sheet = pictures.worst(samples).convert("L")
    seen = {value for count, value in sheet.getcolors(10**6) if count >= 170 * 170}
    assert {i * 10 for i in range(4, 20)} <= seen and not {10, 20, 30} & seen
    assert pictures.worst([]) is None
