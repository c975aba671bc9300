"""Pictures for the eye, drawn with PIL alone: a batch, a confusion matrix, the worst samples."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MARGIN, GAP, TITLE = 16, 10, 18
INK, FAINT, PAPER = (20, 20, 20), (150, 150, 150), (255, 255, 255)
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
    lines = [[label] for label in labels[:limit]] if labels else [[] for _ in shown]
    return _grid(title, shown, lines, columns=min(8, len(shown)))


def worst(samples: list[tuple[Any, str, str, float]]) -> Image.Image | None:
    """The 16 samples with the largest loss. samples: (image, true class, predicted class, loss),
    the image as PIL has it or uint8 [h, w] or [h, w, 3]. None where there is none."""
    if not samples:
        return None
    samples = sorted(samples, key=lambda s: -s[3])[:16]
    images = [s[0] if isinstance(s[0], Image.Image) else Image.fromarray(s[0]) for s in samples]
    lines = [
        [f"true {true}", f"pred {said}", f"loss {loss:.3g}"] for _, true, said, loss in samples
    ]
    title = f"The {len(samples)} samples with the largest loss"
    return _grid(title, images, lines, columns=min(4, len(samples)), smallest=176)


def confusion(matrix: Any, classes: list[str]) -> Image.Image | None:
    """Counts of true (row) by predicted class (column), with the share found of each class.

    matrix: integers [k, k]. Colour is the share of the row: right blue, wrong red. None where there
    are more than 50 classes, which nobody could read.
    """
    counts = np.asarray(matrix)
    k, total, right = len(counts), int(counts.sum()), int(np.trace(counts))
    if not 0 < k <= MOST_CLASSES:
        return None
    cell = 54 if k <= 12 else 40 if k <= 25 else 30
    small, font = _font(11 if cell == 30 else 14), _font(14)
    names = [_fit(name, font, 170) for name in classes]
    side = max(int(font.getlength(name)) for name in names) + GAP
    left, top = MARGIN + TITLE + GAP + side, MARGIN + 2 * TITLE + 2 * GAP + side
    found = int(font.getlength("100.0 %")) + 2 * GAP
    title = f"Confusion matrix: {right:,} of {total:,} right ({100 * right / max(1, total):.2f} %)"
    width = max(left + k * cell + found, 2 * MARGIN + int(_font(TITLE).getlength(title)))
    sheet = Image.new("RGB", (width + MARGIN, top + k * cell + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, INK, _font(TITLE))
    middle = k * cell // 2
    draw.text((left + middle, MARGIN + 2 * TITLE), "predicted", FAINT, font, anchor="mm")
    _upright(sheet, "true", (MARGIN, top + middle), font, FAINT, centred=True)
    draw.text((left + k * cell + GAP, top - 4), "found", FAINT, font, anchor="ls")
    for i, name in enumerate(names):
        at = top + i * cell + cell // 2
        draw.text((left - GAP // 2, at), name, INK, font, anchor="rm")
        _upright(sheet, name, (left + i * cell + cell // 2 - 8, top - GAP // 2), font, INK)
        row = max(1, int(counts[i].sum()))
        share = f"{100 * counts[i, i] / row:.1f} %" if counts[i].sum() else "none"
        draw.text((left + k * cell + GAP, at), share, INK, font, anchor="lm")
        for j in range(k):
            box = (left + j * cell, top + i * cell, left + (j + 1) * cell, top + (i + 1) * cell)
            _cell(draw, box, int(counts[i, j]), counts[i, j] / row, i == j, small)
    return sheet


def _cell(draw: Any, box: tuple, count: int, share: float, right: bool, font: Any) -> None:
    full = (24, 90, 180) if right else (205, 40, 30)
    # The square root lifts the rare mistakes, which are what one looks for, out of the white.
    depth = float(share) ** 0.5
    colour = tuple(round(255 + (c - 255) * depth) for c in full)
    draw.rectangle(box, fill=colour, outline=(225, 225, 225))
    if count:
        text = f"{count}" if count < 10_000 else f"{count / 1000:.0f}k"
        middle = ((box[0] + box[2]) // 2, (box[1] + box[3]) // 2)
        draw.text(middle, text, PAPER if depth > 0.6 else INK, font, anchor="mm")


def _grid(
    title: str, images: list[Image.Image], lines: list[list[str]], columns: int, smallest: int = 128
) -> Image.Image:
    """Images in rows, each with its lines of text below, under a title."""
    images = [_sized(image, smallest) for image in images]
    font, line = _font(15), 19
    wide, high = max(i.width for i in images), max(i.height for i in images)
    deep = high + line * max(len(text) for text in lines) + GAP + 4
    rows = -(-len(images) // columns)
    width = max(columns * (wide + GAP) - GAP, int(_font(TITLE).getlength(title)))
    top = MARGIN + TITLE + GAP + 4
    sheet = Image.new("RGB", (width + 2 * MARGIN, top + rows * deep + MARGIN - GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN - 4), title, INK, _font(TITLE))
    for i, (image, text) in enumerate(zip(images, lines, strict=True)):
        x, y = MARGIN + i % columns * (wide + GAP), top + i // columns * deep
        sheet.paste(image, (x, y))
        draw.rectangle((x - 1, y - 1, x + image.width, y + image.height), outline=FAINT)
        for j, part in enumerate(text):
            draw.text((x, y + high + 4 + j * line), _fit(part, font, wide), INK, font)
    return sheet


def _sized(image: Image.Image, smallest: int) -> Image.Image:
    """A small image enlarged by whole pixels, so that each stays visible; a large one shrunk."""
    side = max(image.size)
    if side < smallest:
        times = -(-smallest // side)
        return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    if side > 256:
        image = image.copy()
        image.thumbnail((256, 256), Image.Resampling.LANCZOS)
    return image


def _upright(
    sheet: Image.Image, text: str, at: tuple[int, int], font: Any, ink: tuple, centred: bool = False
) -> None:
    """Text that reads upwards: `at` is its lower left corner, or with centred its left middle."""
    strip = Image.new("RGB", (int(font.getlength(text)) + 1, 18), PAPER)
    ImageDraw.Draw(strip).text((0, 9), text, ink, font, anchor="lm")
    strip = strip.rotate(90, expand=True)
    sheet.paste(strip, (at[0], at[1] - (strip.height // 2 if centred else strip.height)))


@functools.cache
def _font(size: int) -> Any:
    """DejaVu where the machine has it: PIL's own font has no letters beyond ASCII."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _fit(text: str, font: Any, width: int) -> str:
    """The text, its end cut where it is wider than so many pixels."""
    text = str(text).replace("\n", " ")
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
