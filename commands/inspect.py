"""`leandit inspect`: who quantized a file, what is in it, and how it would load."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ..doctor import comfyui_version
from ..loaders.inspect import group_layers, inspect_file
from .legacy_rotation import add_legacy_rotation
from .tables import megabytes, table


def add_inspect(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the command line's parsers."""
    look = commands.add_parser(
        "inspect", help="say who quantized a file, what is in it, and how it would load"
    )
    look.add_argument(
        "file", type=Path, help="a .safetensors file, or the .safetensors.index.json of shards"
    )
    add_legacy_rotation(look)
    look.set_defaults(run=run_inspect)
    return look


def run_inspect(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print what is in the file, and give the JSON form.

    Raises:
        CheckpointError, OSError: see `inspect_file`.
    """
    version = comfyui_version()
    data = inspect_file(options.file, options.legacy_rotation, version)
    loads = "no fault found" if data["loads"] else "does NOT load"
    writer = {None: "not quantized", "unknown": "quantized in an unknown way"}.get(
        data["writer"], data["writer"]
    )
    model = data["model"] or "a model this command has no name for"
    if not data["layers"] and not data["plain_tensors"]:
        writer, loads = "holds no tensors", "nothing to load"
    console.print(f"{options.file.name}: {writer}; {loads}; {model}")
    columns = ("format", "layers", "size", "rotation", "loads as", "ComfyUI alone")
    groups = table(columns, left=("format", "rotation", "loads as", "ComfyUI alone"))
    for row in group_layers(data):
        size = megabytes(row["bytes"])
        rotation = str(row["group_size"] or "none")
        groups.add_row(
            row["format"], str(row["layers"]), size, rotation, row["loads_as"], row["stock"]
        )
    if data["layers"]:
        console.print(groups)
    console.print(f"plain tensors: {data['plain_tensors']}, {megabytes(data['plain_bytes'])}")
    for note in data["notes"]:
        console.print(f"note: {note}")
    for fault in data["faults"]:
        console.print(
            f"fault: {fault['layer']}: {fault['fault']}; {fault['remedy']}",
            style="red",
        )
    return data
