"""`leandit demo`: digits drawn by a small Flux model in every format, and compared."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .tables import megabytes, table


def add_demo(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the command line's parsers."""
    demo = commands.add_parser(
        "demo",
        help="draw handwritten digits with a small Flux model in every format, and compare",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("leandit-demo"),
        help="folder for grid.png, report.json and the quantized files (default: leandit-demo)",
    )
    demo.set_defaults(run=run_demo)
    return demo


def run_demo(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Draw, print the table, and give the JSON form.

    Raises:
        OSError: if the folder cannot be written.
    """
    from ..demo.run import run_demo as draw  # loads the model's code only when asked for

    _make_writable(options.out)
    with console.status("starting") as status:
        result = draw(options.out, lambda name: status.update(f"drawing digits: {name}"))
    data = result.as_json()
    (options.out / "report.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    console.print(_demo_table(data))
    console.print(f"pictures: {options.out / 'grid.png'}")
    console.print(f"figures:  {options.out / 'report.json'}")
    return data


def _make_writable(folder: Path) -> None:
    """Make a folder and try it, before minutes of work are spent for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"cannot write into {folder} ({error.strerror}); choose --out") from error


def _demo_table(data: dict[str, Any]) -> Table:
    source = data["source"]
    title = f"{source['digits']} digits, {source['steps']} steps, same noise"
    columns = ("format", "layers", "weights", "worst SQNR", "PSNR", "s/step", "read right")
    formats = table(columns, left=("format",), title=title, wrap=False)
    formats.add_row(
        "bf16 (source)",
        "",
        megabytes(source["bytes"]),
        "",
        "",
        f"{source['seconds_per_step']:.3f}",
        f"{source['digits_read']} of {source['digits']}",
    )
    for row in data["formats"]:
        psnr = row["psnr_db"]
        formats.add_row(
            row["format"],
            f"{row['layers_quantized']} of {row['layers_quantized'] + row['layers_kept']}",
            megabytes(row["bytes_after"]),
            f"{row['worst_sqnr_db']:.1f} dB",
            "exact" if psnr is None else f"{psnr:.1f} dB",
            f"{row['seconds_per_step']:.3f}",
            f"{row['digits_read']} of {source['digits']}",
        )
    return formats
