"""The grid picture: a row of digits per format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw

CELL = 56
MARGIN = 8
LABEL_WIDTH = 190


def draw_grid(rows: Sequence[tuple[str, torch.Tensor]], path: Path) -> None:
    """Write a PNG with one labelled row of pictures per entry.

    Args:
        rows: a label (lines separated by newlines) and images (B, 8, 8) in [0, 1] each.
    """
    columns = max(images.shape[0] for _, images in rows)
    width = LABEL_WIDTH + columns * (CELL + MARGIN) + MARGIN
    height = len(rows) * (CELL + MARGIN) + MARGIN
    canvas = Image.new("L", (width, height), 255)
    pen = ImageDraw.Draw(canvas)
    for row, (label, images) in enumerate(rows):
        top = MARGIN + row * (CELL + MARGIN)
        pen.multiline_text((MARGIN, top + 8), label, fill=0)
        for column, image in enumerate(images):
            pixels = (255 * (1 - image.float().clamp(0, 1))).byte().numpy()
            cell = Image.fromarray(pixels, "L").resize((CELL, CELL), Image.Resampling.NEAREST)
            canvas.paste(cell, (LABEL_WIDTH + column * (CELL + MARGIN), top))
    canvas.save(path)
