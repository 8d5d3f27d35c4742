"""`leandit quantize`: a model file into a file."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from ..loaders.convert import quantize_file
from ..quant.families import preset_names
from ..quant.formats import FORMATS, ROTATION_GROUPS
from ..quant.settings import settings_from
from .legacy_rotation import add_legacy_rotation
from .tables import megabytes


def add_quantize(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the command line's parsers."""
    convert = commands.add_parser("quantize", help="quantize a model file into a file")
    convert.add_argument(
        "source", type=Path, help="a .safetensors file, or the .safetensors.index.json of shards"
    )
    convert.add_argument("target", type=Path, help="the .safetensors file to write")
    convert.add_argument(
        "--format", choices=list(FORMATS), default="int8_convrot", help="default: int8_convrot"
    )
    convert.add_argument(
        "--group-size",
        choices=["auto", *map(str, ROTATION_GROUPS)],
        default="auto",
        help="columns rotated together; auto (default): the largest that divides each layer",
    )
    convert.add_argument(
        "--preset", choices=preset_names(), default="auto", help="which layers (default: auto)"
    )
    for name, what in (("include", "quantize although the preset keeps it"), ("exclude", "keep")):
        convert.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"layers to {what}: a glob, or a regular expression after re:; may be repeated",
        )
    convert.add_argument("--overwrite", action="store_true", help="replace the target if it exists")
    add_legacy_rotation(convert)
    convert.set_defaults(run=run_quantize)
    return convert


def run_quantize(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Quantize the file, print what was done, and give the JSON form.

    Raises:
        CheckpointError, QuantError, OSError: see `quantize_file`.
    """
    settings = settings_from(
        options.format,
        options.group_size,
        options.preset,
        "\n".join(options.include),
        "\n".join(options.exclude),
    )
    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:

        def start(total: int) -> Callable[[int], None]:
            task = bar.add_task("", total=total)
            return lambda count: bar.advance(task, count)

        done = quantize_file(
            options.source,
            options.target,
            settings,
            options.overwrite,
            start,
            options.legacy_rotation,
        )
    data = done.as_json(_peak_rss_bytes())
    for note in done.plan.notes:
        console.print(f"note: {note}")
    reasons = Counter(layer["reason"] for layer in data["layers_kept"])
    for reason, count in reasons.items():
        console.print(f"kept {count} x {reason}")
    console.print(
        f"quantized {data['layers_quantized']} layers to {options.format}: "
        f"{megabytes(data['bytes_before'])} -> {megabytes(data['bytes_after'])} "
        f"in {data['seconds']:.1f} s; largest error: {data['worst_sqnr_db']:.1f} dB below the "
        f"signal, {data['worst_layer']}"
    )
    console.print(f"written: {options.target}")
    return data


def _peak_rss_bytes() -> int | None:
    """Largest resident set of this process so far; None where the system does not tell.

    Linux's own counter is asked first: `ru_maxrss` there includes the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
