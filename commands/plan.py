"""`leandit plan`: what of a model fits on a card, in which format, and how fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..loaders.plan_file import plan_file
from ..quant.offload_plan import CARDS
from ..quant.report import size_text
from .tables import table


def add_plan(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the command line's parsers."""
    forecast = commands.add_parser(
        "plan", help="say what of a model fits on a card, in which format, and how fast"
    )
    forecast.add_argument("file", type=Path, help="a .safetensors file, or the index of shards")
    forecast.add_argument(
        "--card", choices=list(CARDS), default="4090", help="whose speed to assume (default: 4090)"
    )
    forecast.add_argument(
        "--vram", type=float, metavar="GIB", help="memory of your card, if not that of --card"
    )
    forecast.add_argument("--ram", type=float, metavar="GIB", help="main memory for the weights")
    forecast.add_argument(
        "--tokens",
        type=int,
        default=4608,
        help="of one step: (width / 16) x (height / 16) for most image models, and those of the text; "
        "1536: 512 x 512; 4608: 1024 x 1024 (the default); 32760: 480p video, 81 frames",
    )
    forecast.set_defaults(run=run_plan)
    return forecast


def run_plan(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the plans, and give the JSON form.

    Raises:
        CheckpointError, SettingsError: see `plan_file`.
    """
    data = plan_file(options.file, options.card, options.vram, options.ram, options.tokens)
    file, device = data["file"], data["machine"]
    console.print(
        f"{file['name']}: {file['family'] or 'unknown family'}, {file['blocks']} blocks, "
        f"{size_text(file['bytes'])}; {device['card']}, {device['vram_bytes'] / 2**30:.3g} GiB, "
        f"{device['tokens']} tokens a step"
    )
    columns = ("format", "weights", "resident", "streamed a step", "s a step", "cost", "why")
    plans = table(columns, left=("format", "why"))
    for row in data["plans"]:
        plans.add_row(
            row["format"], size_text(row["weights_bytes"]), *_figures(row, file["blocks"])
        )
    console.print(plans)
    console.print(
        "cost: against a step of the same format with everything on the card, if blocks are copied "
        f"ahead of their use. Speeds are assumed, not measured: {device['bandwidth'] / 1e9:.0f} GB/s "
        "from pinned memory, and what users of the card report."
    )
    for note in data["notes"]:
        console.print(f"note: {note}")
    return data


def _figures(row: dict[str, Any], blocks: int) -> tuple[str, ...]:
    if not row["fits"]:
        return ("", "", "", "does not fit", row["why"])
    slower = row["step_seconds"] / max(row["compute_seconds"], 1e-9)
    return (
        f"{row['resident_blocks']} of {blocks}",
        size_text(row["streamed_bytes_per_step"]) if row["streamed_bytes_per_step"] else "",
        f"{row['step_seconds']:.3g}",
        "none" if row["hidden"] else f"{slower:.2f}x",
        row["why"],
    )
