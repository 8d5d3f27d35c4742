"""Run the demo: draw digits with the source model and with every format, from the same noise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..loaders.writer import write_native
from ..quant.error import psnr_db
from ..quant.formats import FORMATS
from ..quant.module import quantize_module
from ..quant.settings import settings_from
from .classifier import DigitClassifier, load_classifier, read_digits
from .digits import CHANNELS, CLASSES, SIDE, label_context, label_vector, to_image
from .flux import Flux, load_flux
from .picture import draw_grid
from .sampler import sample

HERE = Path(__file__).parent
MODEL_FILE = HERE / "digits_flux.safetensors"
CLASSIFIER_FILE = HERE / "digits_classifier.safetensors"

STEPS = 16
DIGITS = 100
SHOWN = 10
SEED = 7


@dataclass(frozen=True)
class FormatResult:
    """One row of the demo's table. Ratios in dB; digits_read of `DIGITS` drawn."""

    format: str
    layers_quantized: int
    layers_kept: int
    bytes_before: int
    bytes_after: int
    worst_sqnr_db: float
    psnr_db: float | None
    seconds_per_step: float
    digits_read: int


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo measured; `as_json` is what report.json holds."""

    source: dict[str, Any]
    formats: tuple[FormatResult, ...]

    def as_json(self) -> dict[str, Any]:
        """The public JSON form."""
        return {"source": self.source, "formats": [asdict(row) for row in self.formats]}


def run_demo(out: Path, announce: Callable[[str], None]) -> DemoResult:
    """Draw, measure, and write `grid.png` and one quantized file per format into `out`.

    Runs on one thread: the model is too small to gain from more, and on a busy machine threads
    that wait for each other made it 30 times slower.

    Args:
        announce: is told the format that is being worked on.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(out, announce)
    finally:
        torch.set_num_threads(threads)


def _run(out: Path, announce: Callable[[str], None]) -> DemoResult:
    labels = torch.arange(DIGITS) % CLASSES
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(DIGITS, CHANNELS, SIDE, SIDE, generator=generator).bfloat16()
    classifier = load_classifier(CLASSIFIER_FILE)

    announce("bf16 source")
    model = load_flux(MODEL_FILE, torch.bfloat16)
    bytes_before = _module_bytes(model)
    reference, seconds = _draw(model, noise, labels)
    source = {
        "file": MODEL_FILE.name,
        "dtype": "bfloat16",
        "bytes": bytes_before,
        "digits": DIGITS,
        "digits_read": _count_read(classifier, reference, labels),
        "steps": STEPS,
        "seconds_per_step": seconds,
    }
    rows = [("bf16 (source)", reference[:SHOWN])]
    results = []
    for name in FORMATS:
        announce(name)
        model = load_flux(MODEL_FILE, torch.bfloat16)
        plan, weights, measured = quantize_module(model, settings_from(name), "flux")
        plain = load_file(MODEL_FILE)
        for layer in weights:
            plain.pop(f"{layer}.weight")
        write_native(out / f"digits_{name}.safetensors", plain, weights, {})
        images, seconds = _draw(model, noise, labels)
        psnr = psnr_db(images, reference)
        results.append(
            FormatResult(
                format=name,
                layers_quantized=len(weights),
                layers_kept=len(plan.kept),
                bytes_before=bytes_before,
                bytes_after=bytes_before
                + sum(r.nbytes for r in measured.values())
                - sum(d.layer.nbytes for d in plan.selected),
                worst_sqnr_db=round(min(r.sqnr_db for r in measured.values()), 2),
                psnr_db=round(psnr, 2) if math.isfinite(psnr) else None,
                seconds_per_step=seconds,
                digits_read=_count_read(classifier, images, labels),
            )
        )
        rows.append((f"{name}\nPSNR {psnr:.1f} dB", images[:SHOWN]))
    draw_grid(rows, out / "grid.png")
    return DemoResult(source, tuple(results))


def _draw(model: Flux, noise: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Images (B, 8, 8) and the seconds one step took."""
    context, vector = label_context(labels), label_vector(labels)
    started = time.perf_counter()
    latent = sample(model, noise, context, vector, STEPS)
    seconds = (time.perf_counter() - started) / STEPS
    return to_image(latent).clamp(0, 1), round(seconds, 4)


def _count_read(classifier: DigitClassifier, images: torch.Tensor, labels: torch.Tensor) -> int:
    return int((read_digits(classifier, images) == labels).sum())


def _module_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())
