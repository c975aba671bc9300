import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from meshwork.config import ConfigError
from meshwork.data import imagefolder, table
from meshwork.data.imagefolder import read_image
from meshwork.data.loader import BadImage, Samples, eval_steps, explain, loader
from meshwork.data.transforms import eval_transform

IMAGES = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bicubic", "crop_pct": 1.0}
SCAN = Path(__file__).parents[1] / "scripts" / "scan.py"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "meshwork"


@pytest.fixture
def root(tmp_path):
    """train/{cat,dog} with 10 images each, val/{cat,dog} with 5."""
    for split, n in (("train", 10), ("val", 5)):
        for label, name in enumerate(("cat", "dog")):
            for k in range(n):
                paint(tmp_path / "set" / split / name / f"{k}.jpg", 100 * label + k)
    return tmp_path / "set"


def paint(path, value=0, mode="RGB", size=(9, 7), **how):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    colour = (
        value if mode in ("L", "1", "I;16") else (value,) * len(Image.new(mode, (1, 1)).getbands())
    )
    Image.new(mode, size, colour).save(path, **how)


def targets(dataset):
    return [dataset[i][1] for i in range(len(dataset))]


def names(dataset):
    return [Path(dataset.path(i)).name for i in range(len(dataset))]


def test_labels_are_the_places_of_trains_class_folders(root):
    for k in range(3):
        paint(root / "train" / "ant" / f"{k}.png")
    data = imagefolder(str(root), 32)
    assert data.classes == ("ant", "cat", "dog")
    assert targets(data.train) == [0] * 3 + [1] * 10 + [2] * 10
    assert targets(data.val) == [1] * 5 + [2] * 5  # val/ has no ant
    assert (data.in_chans, data.image_size, data.test, data.predict) == (3, 32, None, None)
    assert data.train.path(3) == str(root / "train" / "cat" / "0.jpg")


def test_a_mode_gets_the_splits_it_needs(root):
    paint(root / "test" / "dog" / "a.jpg")
    validate = imagefolder(str(root), 32, mode="validate")
    assert (validate.train, len(validate.val)) == (None, 10)
    for mode in ("test", "predict"):
        test = imagefolder(str(root), 32, mode=mode)
        assert (test.train, test.val, targets(test.test)) == (None, None, [1])
        assert test.classes == ("cat", "dog")


def test_a_fraction_of_each_class_is_split_off_whatever_the_seed_of_the_run(root):
    whole = str(root / "train")
    paint(root / "train" / "rare" / "only.jpg")
    data = imagefolder(whole, 32, val_fraction=0.3)
    assert data.classes == ("cat", "dog", "rare")
    assert np.bincount(targets(data.val)).tolist() == [3, 3]  # one image alone is trained on
    assert np.bincount(targets(data.train)).tolist() == [7, 7, 1]
    paths = [{d.path(i) for i in range(len(d))} for d in (data.train, data.val)]
    assert not paths[0] & paths[1]
    again = imagefolder(whole, 32, mode="validate", val_fraction=0.3, seed=9)
    assert names(again.val) == names(data.val)
    assert names(imagefolder(whole, 32, val_fraction=0.3, split_seed=1).val) != names(data.val)


def test_hidden_and_empty_files_and_others_are_no_samples_and_counted(root):
    train = root / "train"
    for path in (".DS_Store", "cat/._1.jpg", "cat/empty.jpg", "cat/notes.txt", "loose.jpg"):
        (train / path).write_bytes(b"" if "empty" in path else b"x" * 100)
    paint(train / ".ipynb_checkpoints" / "1.jpg")
    paint(train / "cat" / ".cache" / "1.jpg")
    paint(train / "cat" / "deep" / "er" / "Z.JPEG")
    data = imagefolder(str(root), 32)
    assert data.classes == ("cat", "dog") and len(data.train) == 21
    assert "Z.JPEG" in names(data.train)
    assert data.train.left_out == {
        "hidden": 4,
        "empty": 1,
        "other files": 1,
        "outside of a class folder": 1,
    }


ODD = [
    "épée ü.jpg",
    "a=b,c.jpg",
    "[1] {x} (y).jpg",
    "模型.png",
    "two\nlines.png",
    b"bytes \xff.jpg",
]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_of_files_and_classes_work(root, name):
    name = os.fsencode(name)
    path = os.path.join(os.fsencode(root), b"train", b"class " + name, name)
    try:
        paint(os.fsdecode(path), 7)
    except OSError:
        pytest.skip("this file system does not take the name")
    data = imagefolder(str(root), 32)
    index = targets(data.train).index(1)
    assert np.asarray(data.train[index][0]).max() == 7
    shown = data.train.path(index) + data.classes[1]
    assert shown.isprintable() and shown.encode()
    with open(path, "wb") as file:
        file.write(b"text")
    with pytest.raises(BadImage) as error:
        data.train[index]
    assert str(error.value).isprintable()


def test_a_folder_laid_out_otherwise_is_answered_by_a_sentence(root, tmp_path):
    def refused(match, path=root, **how):
        with pytest.raises(ConfigError, match=match):
            imagefolder(str(path), 32, **how)

    refused("cannot list the folder .*nowhere.*change data.root", tmp_path / "nowhere")
    refused("found val/ .*set data.val_fraction=null", val_fraction=0.1)
    refused("no test/ in data.root", mode="test")
    refused("model.in_chans=4: .* 1 or 3", in_chans=4)
    refused(r"found cat/, dog/ in data.root=.*data.val_fraction=0.1", root / "train")
    refused("found no folders in data.root", root / "train" / "cat")
    refused("predict_root=.*nowhere is no folder", mode="predict", predict_root="/nowhere")
    paint(root / "val" / "emu" / "1.jpg")
    refused("class folders that train/ has not: emu")
    (root / "val" / "emu").rename(root / "train" / "emu")
    (root / "train" / "emu" / "1.jpg").write_bytes(b"")
    refused("class folders without an image in .*train: emu")
    (root / "val").rename(root / "away")
    refused("found away/, train/ but no val/")
    (root / "train").rename(root / "test")
    refused("found away/, test/ in data.root=.*expected train/CLASS")


def test_numbers_of_samples_are_drawn_and_checked(root):
    data = imagefolder(str(root), 32, num_samples=7, val_samples=3)
    assert (len(data.train), len(data.val)) == (7, 3)
    with pytest.raises(ConfigError, match=r"data.num_samples=21.*nearest valid: 20\)"):
        imagefolder(str(root), 32, num_samples=21)


def test_a_tree_without_labels_gives_every_image_in_order_of_path(root, tmp_path):
    for name in ("b/2.png", "a/x/1.png", "0.png", ".hidden/3.png"):
        paint(tmp_path / "new" / name)
    data = imagefolder(str(root), 32, mode="predict", predict_root=str(tmp_path / "new"))
    assert names(data.predict) == ["0.png", "1.png", "2.png"]
    assert targets(data.predict) == [0, 1, 2]
    assert data.predict.path(1) == str(tmp_path / "new" / "a" / "x" / "1.png")


def test_links_are_followed_but_never_in_a_circle(root):
    (root / "train" / "cat" / "more").symlink_to(root / "train" / "dog")
    (root / "train" / "dog" / "back").symlink_to(root / "train")
    data = imagefolder(str(root), 32)
    assert np.bincount(targets(data.train)).tolist() == [20, 10]


# ---- kinds of images -----------------------------------------------------------------------------


def test_every_kind_of_image_gives_the_channels_asked_for(tmp_path):
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half.putpixel((0, 0), (10, 20, 30, 255))
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((3, 3), 1)
    frames = [Image.new("RGB", (4, 4), c) for c in ((250, 0, 0), (0, 0, 250))]
    wide = Image.fromarray(np.full((4, 4), 0x80FF, np.uint16))
    kinds = {
        "l.png": (Image.new("L", (4, 4), 77), {}, (77, 77, 77)),
        "la.png": (Image.new("LA", (4, 4), (0, 0)), {}, (255, 255, 255)),
        "rgba.png": (half, {}, (10, 20, 30)),
        "p.png": (palette, {}, (10, 20, 30)),
        "p_transparent.png": (palette, {"transparency": 0}, (255, 255, 255)),
        "rgb_transparent.png": (half.convert("RGB"), {"transparency": (10, 20, 30)}, (255,) * 3),
        "cmyk.jpg": (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), {"quality": 100}, (255, 0, 0)),
        "one.png": (Image.new("1", (4, 4), 1), {}, (255, 255, 255)),
        "wide.png": (wide, {}, (128, 128, 128)),
        "wide.tif": (wide, {}, (128, 128, 128)),
        "moving.gif": (frames[0], {"save_all": True, "append_images": frames[1:]}, (250, 0, 0)),
    }
    for name, (image, how, colour) in kinds.items():
        image.save(tmp_path / name, **how)
        rgb, grey = (read_image(tmp_path / name, mode) for mode in ("RGB", "L"))
        assert (rgb.mode, grey.mode, rgb.size) == ("RGB", "L", (4, 4)), name
        assert np.abs(np.subtract(rgb.getpixel((0, 0)), colour)).max() <= 2, name
        expected = Image.new("RGB", (1, 1), rgb.getpixel((0, 0))).convert("L").getpixel((0, 0))
        assert grey.getpixel((0, 0)) == expected, name
    assert read_image(tmp_path / "rgba.png", "RGB").getpixel((1, 1)) == (255, 255, 255)


def test_a_picture_is_turned_as_its_camera_says(tmp_path):
    image, exif = Image.new("RGB", (8, 4), (0, 0, 0)), Image.Exif()
    image.paste((255, 255, 255), (0, 0, 4, 4))
    exif[0x0112] = 6  # turn clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    found = read_image(tmp_path / "turned.png", "L")
    assert found.size == (4, 8)
    assert (found.getpixel((0, 0)), found.getpixel((0, 7))) == (255, 0)


@pytest.mark.parametrize("in_chans", [1, 3])
def test_images_of_all_modes_make_one_batch(root, in_chans):
    for mode in ("L", "LA", "RGBA", "1"):
        paint(root / "val" / "cat" / f"{mode}.png", 1, mode)
    data = imagefolder(str(root), 16, in_chans=in_chans)
    samples = Samples(data.val, eval_transform(IMAGES, 16, in_chans), 0, train=False)
    batch = samples[eval_steps(14, 14, 0, 1)[0]]
    assert batch.inputs[0].shape == (14, in_chans, 16, 16)
    assert data.in_chans == in_chans


# ---- broken images -------------------------------------------------------------------------------


def truncated_jpeg(path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])


def broken_png(path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path, format="png")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def text(path):
    path.write_text("<html>not found</html>")


def dangling(path):
    path.symlink_to("/nowhere/else.jpg")


BROKEN = {
    "cut.jpg": (truncated_jpeg, "truncated"),
    "broken.png": (broken_png, "broken|checksum|CRC|chunk|decod"),
    "page.jpg": (text, "not an image"),
    "gone.jpg": (dangling, "No such file"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named_or_skipped(root, name, workers):
    spoil, reason = BROKEN[name]
    path = root / "val" / "cat" / name
    spoil(path)
    val = imagefolder(str(root), 16).val
    assert len(val) == 11

    def batches(policy):
        samples = Samples(val, eval_transform(IMAGES, 16, 3), 0, False, (), policy)
        return list(loader(samples, eval_steps(11, 6, 0, 1), workers, torch.device("cpu"), 60))

    try:
        batches("raise")
    except BadImage as error:
        message = str(error.with_traceback(None))
        assert "scripts/scan.py" in explain(error)
    assert message.startswith(f"cannot read the image {path}: ") and "\n" not in message
    assert any(word in message for word in reason.split("|")), message
    first, second = batches("skip")
    assert first.weight.sum() + second.weight.sum() == 10
    assert [p for p, _ in first.bad + second.bad] == [str(path)]


def test_the_scan_command_lists_broken_images(root):
    def scan():
        command = [sys.executable, str(SCAN), str(root), "--workers", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.splitlines()

    assert scan() == (0, ["30 images, 0 of them bad; left out: nothing"])
    text(root / "train" / "cat" / "page.jpg")
    code, lines = scan()
    assert code == 1
    assert lines[0].startswith(f"cannot read the image {root}/train/cat/page.jpg: not an image")
    assert lines[1].startswith("31 images, 1 of them bad")


# ---- the table -----------------------------------------------------------------------------------


def age(root):
    """Makes the folders look untouched for a while: newer ones are scanned again."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, (time.time() - 100,) * 2)


@pytest.fixture
def scans(monkeypatch):
    """The folders that were scanned, in order."""
    found, scan = [], table.scan
    monkeypatch.setattr(table, "scan", lambda *a: found.append(a[0]) or scan(*a))
    return found


def test_a_folder_is_scanned_once_while_it_stays_as_it_is(root, cache, scans):
    age(root)
    first, second = imagefolder(str(root), 32), imagefolder(str(root), 32)
    assert len(scans) == 2  # train and val
    assert names(first.train) == names(second.train)
    assert targets(first.train) == targets(second.train)
    assert cache.stat().st_mode & 0o077 == 0


def test_a_changed_folder_is_scanned_again(root, cache, scans):
    age(root)
    imagefolder(str(root), 32)
    paint(root / "train" / "cat" / "new.jpg")
    assert len(imagefolder(str(root), 32).train) == 21
    age(root)
    for _ in range(2):
        assert len(imagefolder(str(root), 32).train) == 21
    assert len(scans) == 5
    assert len(list(cache.glob("*.npz"))) == 2


def test_a_file_added_a_moment_after_the_scan_is_seen(root):
    for k in range(3):
        paint(root / "train" / "cat" / f"new {k}.jpg")
        assert len(imagefolder(str(root), 32).train) == 21 + k


@pytest.mark.parametrize("content", [b"", b"{", b"PK\x03\x04"])
def test_a_cache_that_is_damaged_is_done_without(root, cache, scans, content):
    age(root)
    imagefolder(str(root), 32)
    for path in cache.glob("*.npz"):
        path.write_bytes(content)
    assert len(imagefolder(str(root), 32).train) == 20
    assert len(scans) == 4


def test_a_cache_that_cannot_be_written_is_done_without(root, cache, scans):
    age(root)
    cache.parent.mkdir()
    cache.write_text("a file in its place")
    assert len(imagefolder(str(root), 32).train) == 20
    assert len(scans) == 2


def test_a_full_disk_leaves_no_half_table(root, cache, scans, monkeypatch):
    age(root)

    def full(path, **arrays):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(imagefolder(str(root), 32).train) == 20
    assert {path.suffix for path in cache.iterdir()} <= {".lock"}
