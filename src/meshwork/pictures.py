"""Pictures for the eye, drawn with PIL alone: a batch, a confusion matrix, the worst samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

MARGIN, GAP, LINE = 16, 10, 19
TILE, CELL = 192, 42  # sides of a sample's picture and of a cell of the matrix
INK, FAINT, PAPER = (20, 20, 20), (150, 150, 150), (255, 255, 255)
RIGHT, WRONG = (24, 90, 180), (205, 40, 30)
MOST_CLASSES = 50


def picture(image: Any, mean: Sequence[float], std: Sequence[float]) -> Image.Image:
    """One normalised float tensor [c, h, w] as a grey or RGB image: of more channels the first 3.

    mean, std: what was subtracted and divided by, one a channel or one for all.
    """
    pixels = image.detach().float().cpu().numpy()
    channels = 3 if len(pixels) >= 3 else 1
    mean, std = (np.resize(np.asarray(v, np.float32), channels)[:, None, None] for v in (mean, std))
    pixels = np.nan_to_num(pixels[:channels] * std + mean).clip(0, 1)
    pixels = (pixels * 255).round().astype(np.uint8).transpose(1, 2, 0)
    return Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])


def batch_grid(
    images: Any,
    mean: Sequence[float],
    std: Sequence[float],
    labels: list[str] | None,
    limit: int = 32,
) -> Image.Image | None:
    """The first images of a batch as the model sees them, each with its label below.

    images: float tensor [n, c, h, w], normalised by mean and std. None where it is no such batch.
    """
    if getattr(images, "ndim", 0) != 4 or not images.is_floating_point() or not len(images):
        return None
    n, channels, height, width = images.shape
    shown = [picture(image, mean, std) for image in images[:limit]]
    title = f"{len(shown)} of {n} images as the model sees them: {channels} x {height} x {width}"
    return _grid(title, shown, [[label] for label in labels or [""] * n][:limit], columns=8)


def worst(samples: list[tuple[Image.Image, str, str, float]]) -> Image.Image | None:
    """The 16 samples with the largest loss. samples: (image, true class, predicted class, loss).
    None where there is none."""
    if not samples:
        return None
    samples = sorted(samples, key=lambda s: -s[3])[:16]
    lines = [
        [f"true {true}", f"pred {said}", f"loss {loss:.3g}"] for _, true, said, loss in samples
    ]
    title = f"The {len(samples)} samples with the largest loss"
    return _grid(title, [s[0] for s in samples], lines, columns=4)


def confusion(matrix: Any, classes: list[str]) -> Image.Image | None:
    """Counts of true (row) by predicted class (column), with the share found of each class.

    matrix: integers [k, k]. Colour is the share of the row: right blue, wrong red. None where there
    are more than 50 classes, which nobody could read.
    """
    counts = np.asarray(matrix)
    k, total, right = len(counts), int(counts.sum()), int(np.trace(counts))
    if not 0 < k <= MOST_CLASSES:
        return None
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    names = [_short(name) for name in classes]
    found = [f"{name}  {share:.0%}" for name, share in zip(names, shares.diagonal(), strict=True)]
    title = f"Rows true, columns predicted: {right:,} of {total:,} right"
    rows, columns = _names(found), _names(names).rotate(90, expand=True)
    left, top = MARGIN + rows.width, MARGIN + LINE + GAP + columns.height
    width = max(left + k * CELL, MARGIN + int(_font().getlength(title))) + MARGIN
    sheet = Image.new("RGB", (width, top + k * CELL + MARGIN), PAPER)
    sheet.paste(rows, (MARGIN, top))
    sheet.paste(columns, (left, top - columns.height))
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, _font())
    # The square root lifts the rare mistakes, which are what one looks for, out of the white.
    depth = np.sqrt(shares)[:, :, None]
    colours = 255 + depth * (np.where(np.eye(k, dtype=bool)[:, :, None], RIGHT, WRONG) - 255)
    cells = Image.fromarray(colours.round().astype(np.uint8))
    sheet.paste(cells.resize((k * CELL, k * CELL), Image.Resampling.NEAREST), (left, top))
    for i, j in np.argwhere(counts).tolist():
        middle = (left + j * CELL + CELL // 2, top + i * CELL + CELL // 2)
        ink = PAPER if depth[i, j] > 0.6 else INK
        draw.text(middle, str(counts[i, j]), ink, _font(12), anchor="mm")
    return sheet


def _names(names: list[str]) -> Image.Image:
    """Names below each other, a cell's height each."""
    width = max(int(_font().getlength(name)) for name in names) + GAP
    sheet = Image.new("RGB", (width, len(names) * CELL), PAPER)
    for i, name in enumerate(names):
        ImageDraw.Draw(sheet).text((2, i * CELL + CELL // 2), name, INK, _font(), anchor="lm")
    return sheet


def _grid(
    title: str, images: list[Image.Image], lines: list[list[str]], columns: int
) -> Image.Image:
    """Images in rows, each with its lines of text below, under a title."""
    columns = min(columns, len(images))
    deep = TILE + LINE * len(lines[0]) + GAP
    top = MARGIN + LINE + GAP
    width = max(columns * (TILE + GAP), int(_font().getlength(title))) + 2 * MARGIN
    sheet = Image.new("RGB", (width, top + -(-len(images) // columns) * deep + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, _font())
    for i, (image, text) in enumerate(zip(images, lines, strict=True)):
        x, y = MARGIN + i % columns * (TILE + GAP), top + i // columns * deep
        small = max(image.size) < TILE  # each of its pixels stays visible
        how = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
        shown = ImageOps.contain(image, (TILE, TILE), how)
        sheet.paste(shown, (x, y))
        draw.rectangle((x - 1, y - 1, x + shown.width, y + shown.height), outline=FAINT)
        below = "\n".join(_short(line) for line in text)
        draw.multiline_text((x, y + TILE + 4), below, INK, _font())
    return sheet


def _font(size: int = 14) -> Any:
    """DejaVu where the machine has it: PIL's own font has no letters beyond ASCII."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _short(text: str) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= 22 else text[:20] + "..."
