"""A folder of images: train/CLASS/..., val/CLASS/..., perhaps test/CLASS/...; or only CLASS/..."""

import contextlib
import errno
import os

import numpy as np
from PIL import Image, ImageOps

from meshwork.config import ConfigError
from meshwork.data.loader import BadImage
from meshwork.data.splits import Splits, Subset, subset
from meshwork.data.table import Table, cached, is_hidden

EXPECTED = "expected train/CLASS/... and val/CLASS/..., or CLASS/... with data.val_fraction=0.1"


class ImageFolder:
    """Pairs (PIL image, label) of a table's files.

    mode: L or RGB. labels: an integer for each file. Raises BadImage for a file that cannot be
    read.
    """

    draws = False

    def __init__(self, table: Table, mode: str, labels: np.ndarray):
        self.table, self.mode, self.labels = table, mode, labels
        self.left_out = table.left_out  # how many files of which kind are no samples

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return read_image(self.table.path(index), self.mode), int(self.labels[index])

    def path(self, index: int) -> str:
        """The file's path; bytes that are not UTF-8 as backslash escapes."""
        return shown(self.table.path(index))


def imagefolder(
    root: str,
    image_size: int,
    mode: str = "train",
    seed: int = 0,
    num_samples: int | None = None,
    val_samples: int | None = None,
    val_fraction: float | None = None,
    predict_root: str | None = None,
    in_chans: int | None = None,
    split_seed: int = 0,
) -> Splits:
    """The splits that `mode` needs; labels are the ranks of the names of train's class folders.

    Without val/, val_fraction of each class is split off, by split_seed (data.args.split_seed), not
    by the run's seed: runs of several seeds are measured on the same images, and mode=validate
    never meets trained ones. predict_root: a tree of images without labels.
    Raises ConfigError for a folder that is laid out otherwise.
    """
    if in_chans not in (None, 1, 3):
        raise ConfigError(f"model.in_chans={in_chans}: images are given with 1 or 3 channels")
    pixels = "L" if in_chans == 1 else "RGB"
    folders = _folders(root)
    split = val_fraction is not None
    _check_layout(root, folders, split, mode)
    train_root = os.path.join(root, "train") if b"train" in folders else root
    names = _folders(train_root)
    train = val = test = predict = None
    if mode == "train" or (split and mode == "validate"):
        train = _labelled(train_root, names, pixels)
        _check_classes(train, names)
        if split:
            train, val = _split(train, val_fraction, split_seed)
        train = subset(train, num_samples, seed, "data.num_samples")
    if mode in ("train", "validate") and not split:
        val = _labelled(os.path.join(root, "val"), names, pixels)
    if val is not None:
        val = subset(val, val_samples, split_seed, "data.val_samples")
    if mode == "test" or (mode == "predict" and predict_root is None):
        test = _labelled(os.path.join(root, "test"), names, pixels)
    if mode == "predict" and predict_root is not None:
        if not os.path.isdir(predict_root):
            raise ConfigError(f"data.predict_root={predict_root} is no folder")
        table = _table(predict_root, by_class=False)
        predict = ImageFolder(table, pixels, np.arange(len(table)))
    classes = tuple(shown(name) for name in names)
    return Splits(train, val, test, predict, classes, in_chans or 3, image_size)


# ---- the layout of the folder --------------------------------------------------------------------


def _folders(root: str) -> list[bytes]:
    try:
        entries = list(os.scandir(os.fsencode(root)))
    except OSError as e:
        raise ConfigError(f"cannot list the folder {root} ({e.strerror}): change data.root") from e
    return sorted(e.name for e in entries if e.is_dir() and not is_hidden(e.name))


def _check_layout(root: str, folders: list[bytes], split: bool, mode: str) -> None:
    special = {b"train", b"val", b"test"} & set(folders)
    found = ", ".join(f"{shown(name)}/" for name in folders[:5]) or "no folders"
    found += ", ..." if len(folders) > 5 else ""
    if not folders or (special and b"train" not in special) or (not special and not split):
        raise ConfigError(f"found {found} in data.root={root}: {EXPECTED}")
    if b"val" in special and split:
        raise ConfigError(
            f"found val/ in data.root={root} and data.val_fraction: set "
            "data.val_fraction=null to use val/, or take the folder away"
        )
    if mode in ("train", "validate") and b"val" not in special and not split:
        raise ConfigError(f"found {found} but no val/ in data.root={root}: {EXPECTED}")
    if mode == "test" and b"test" not in special:
        raise ConfigError(f"found {found} but no test/ in data.root={root}: mode=test needs it")


def _table(root: str, by_class: bool) -> Table:
    try:
        table = cached(root, by_class)
    except OSError as error:
        raise ConfigError(f"cannot list {root}: {error}") from error
    if len(table) == 0:
        raise ConfigError(f"no images in {root} (left out: {table.left_out or 'nothing'})")
    return table


def _labelled(root: str, names: list[bytes], mode: str) -> ImageFolder:
    table = _table(root, by_class=True)
    labels = {name: label for label, name in enumerate(names)}
    if unknown := [shown(name) for name in table.classes if name not in labels]:
        raise ConfigError(
            f"{root} has class folders that train/ has not: {', '.join(unknown)}; rename or move "
            f"them, train/ has {', '.join(shown(name) for name in names[:10])}"
        )
    label_of = np.array([labels[name] for name in table.classes])
    return ImageFolder(table, mode, label_of[table.labels])


def _check_classes(data: ImageFolder, names: list[bytes]) -> None:
    counts = np.bincount(data.labels, minlength=len(names))
    if empty := [shown(names[k]) for k in np.flatnonzero(counts == 0)]:
        raise ConfigError(
            f"class folders without an image in {shown(data.table.root)}: {', '.join(empty)}; "
            "remove them or add images"
        )


def _split(data: ImageFolder, fraction: float, seed: int) -> tuple[Subset, Subset]:
    """Rows to train on and rows to validate: the same share of each class, at least one image."""
    labels, rng, chosen = data.labels, np.random.default_rng(seed), []
    for rows in np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1]):
        n = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        chosen.append(rng.permutation(rows)[:n])
    held_out = np.zeros(len(labels), bool)
    held_out[np.concatenate(chosen)] = True
    if not held_out.any():
        raise ConfigError(f"data.val_fraction={fraction}: no class has two images to split")
    return Subset(data, np.flatnonzero(~held_out)), Subset(data, np.flatnonzero(held_out))


# ---- one image -----------------------------------------------------------------------------------


def read_image(path: str | bytes, mode: str) -> Image.Image:
    """A file's image in mode L or RGB, turned as its EXIF orientation says; of several the first.

    What is transparent is laid on white; 16-bit grey is divided by 256.
    Raises BadImage with path and reason.
    """
    try:
        with Image.open(os.fsdecode(path)) as image:
            image.load()
            with contextlib.suppress(Exception):  # a broken EXIF block spoils no pixels
                image = ImageOps.exif_transpose(image)
            return _in_mode(image, mode)
    except Exception as error:  # PIL's decoders raise nearly every kind
        ours = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in ours:
            raise
        raise BadImage(shown(os.fsencode(path)), _reason(error)) from error


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode and "transparency" not in image.info:
        return image.copy()
    if image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.int64)
        return Image.fromarray((wide.clip(0, 65535) >> 8).astype(np.uint8)).convert(mode)
    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers: expected 8 or 16 bits a channel")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if mode == "L" and image.mode not in ("1", "LA"):
        image = image.convert("RGB")
    return image.convert(mode)


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image that PIL knows"
    told = getattr(error, "strerror", None) or " ".join(str(error).split())
    return told or type(error).__name__


def shown(path: bytes) -> str:
    """A path on one line, whatever bytes it holds."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
