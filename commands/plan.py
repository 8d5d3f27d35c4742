"""`leandit plan`: what of a model fits on a card, in which format, and how fast."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..loaders.plan_file import plan_file
from ..quant.offload_plan import CARDS
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
    forecast.add_argument("--vram", type=float, metavar="GIB", help="its memory, if another")
    forecast.add_argument("--ram", type=float, metavar="GIB", help="main memory for the weights")
    forecast.add_argument(
        "--tokens", type=int, default=4608, help="of one step; 4608: 1024 x 1024 (the default)"
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
        f"{file['bytes'] / 1e9:.2f} GB; {device['card']}, {device['vram_bytes'] / 2**30:.0f} GiB, "
        f"{device['tokens']} tokens, rates {device['rates']}"
    )
    columns = ("format", "weights", "resident", "streamed a step", "s a step", "cost", "why")
    plans = table(columns, left=("format", "why"))
    for row in data["plans"]:
        slower = row["step_seconds"] / row["compute_seconds"]
        cost = ("none" if row["hidden"] else f"{slower:.2f}x") if row["fits"] else "does not fit"
        plans.add_row(
            row["format"],
            f"{row['weights_bytes'] / 1e9:.2f} GB",
            f"{row['resident_blocks']} of {file['blocks']}",
            f"{row['streamed_bytes_per_step'] / 1e9:.2f} GB",
            f"{row['step_seconds']:.3g}",
            cost,
            row["why"],
        )
    console.print(plans)
    return data
