"""The command line: the same capabilities without ComfyUI."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from . import doctor
from .bench.command import add_bench
from .loaders.convert import quantize_file
from .loaders.errors import CheckpointError
from .loaders.inspect import group_layers, inspect_file
from .loaders.plan_file import plan_file
from .loaders.survey import LEGACY_ROTATIONS
from .quant.errors import QuantError
from .quant.families import preset_names
from .quant.formats import FORMATS, ROTATION_GROUPS
from .quant.offload_plan import CARDS
from .quant.settings import settings_from

PIPE_WIDTH = 10_000
DONE, OUR_FAULT, USERS_FAULT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 when done, 2 when the input is wrong, 1 for a fault of ours."""
    options = _parser().parse_args(arguments)
    # With --json, stdout carries the JSON object and nothing else.
    console, errors = _console(options.json), _console(True)
    try:
        result = options.run(options, console)
    except (QuantError, CheckpointError, OSError) as error:
        words = _os_error(error) if isinstance(error, OSError) else str(error)
        errors.print(f"leandit: {words}", style="red")
        if options.json:
            print(json.dumps({"error": words}))
        return USERS_FAULT
    except KeyboardInterrupt:
        errors.print("leandit: interrupted")
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return OUR_FAULT
    if options.json:
        print(json.dumps(result, allow_nan=False))
    return DONE


def _console(stderr: bool) -> Console:
    """Text as it is: file names are no markup, and a pipe gets lines of any length."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def _os_error(error: OSError) -> str:
    path = error.filename2 or error.filename
    if isinstance(error, FileNotFoundError) and path is not None:
        return f"{path}: does not exist; check the name and the folder"
    if isinstance(error, IsADirectoryError) and path is not None:
        return f"{path}: is a folder; name a .safetensors file in it"
    if isinstance(error, PermissionError) and path is not None:
        return f"{path}: may not be read or written; check its permissions"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leandit", description="Quantize large diffusion transformers and see what it costs."
    )
    parser.add_argument("--version", action="version", version=f"leandit {version('leandit')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
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
    demo.set_defaults(run=_demo)
    convert = commands.add_parser("quantize", help="quantize a model file into a file")
    _add_quantize_arguments(convert)
    look = commands.add_parser(
        "inspect", help="say who quantized a file, what is in it, and how it would load"
    )
    look.add_argument(
        "file", type=Path, help="a .safetensors file, or the .safetensors.index.json of shards"
    )
    for command in (convert, look):
        command.add_argument(
            "--legacy-rotation",
            choices=LEGACY_ROTATIONS,
            default="auto",
            help="of int8 files that do not record whether they are rotated (default: auto)",
        )
    look.set_defaults(run=_inspect)
    check = commands.add_parser("doctor", help="say what this machine can run, and why not")
    check.set_defaults(run=_doctor)
    measure = add_bench(commands)
    forecast = commands.add_parser(
        "plan", help="say what of a model fits on a card, in which format, and how fast"
    )
    _add_plan_arguments(forecast)
    for command in (demo, convert, look, check, measure, forecast):
        command.add_argument(
            "--json", action="store_true", help="print one JSON object on stdout, nothing else"
        )
    return parser


def _add_quantize_arguments(convert: argparse.ArgumentParser) -> None:
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
    convert.set_defaults(run=_quantize)


def _add_plan_arguments(forecast: argparse.ArgumentParser) -> None:
    forecast.add_argument("file", type=Path, help="a .safetensors file, or the index of shards")
    forecast.add_argument(
        "--card", choices=list(CARDS), default="4090", help="whose speed to assume (default: 4090)"
    )
    forecast.add_argument("--vram", type=float, metavar="GIB", help="its memory, if another")
    forecast.add_argument("--ram", type=float, metavar="GIB", help="main memory for the weights")
    forecast.add_argument(
        "--tokens", type=int, default=4608, help="of one step; 4608: 1024 x 1024 (the default)"
    )
    forecast.set_defaults(run=_plan)


def _plan(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    data = plan_file(options.file, options.card, options.vram, options.ram, options.tokens)
    file, device = data["file"], data["machine"]
    console.print(
        f"{file['name']}: {file['family'] or 'unknown family'}, {file['blocks']} blocks, "
        f"{file['bytes'] / 1e9:.2f} GB; {device['card']}, {device['vram_bytes'] / 2**30:.0f} GiB, "
        f"{device['tokens']} tokens, rates {device['rates']}"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("format", "weights", "resident", "streamed a step", "s a step", "cost", "why"):
        table.add_column(name, justify="left" if name in ("format", "why") else "right")
    for row in data["plans"]:
        slower = row["step_seconds"] / row["compute_seconds"]
        cost = ("none" if row["hidden"] else f"{slower:.2f}x") if row["fits"] else "does not fit"
        table.add_row(
            row["format"],
            f"{row['weights_bytes'] / 1e9:.2f} GB",
            f"{row['resident_blocks']} of {file['blocks']}",
            f"{row['streamed_bytes_per_step'] / 1e9:.2f} GB",
            f"{row['step_seconds']:.3g}",
            cost,
            row["why"],
        )
    console.print(table)
    return data


def _quantize(options: argparse.Namespace, console: Console) -> dict[str, Any]:
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
        f"{_megabytes(data['bytes_before'])} -> {_megabytes(data['bytes_after'])} "
        f"in {data['seconds']:.1f} s; largest error: {data['worst_sqnr_db']:.1f} dB below the "
        f"signal, {data['worst_layer']}"
    )
    console.print(f"written: {options.target}")
    return data


def _inspect(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    version = doctor.comfyui_version()
    data = inspect_file(options.file, options.legacy_rotation, version)
    loads = "no fault found" if data["loads"] else "does NOT load"
    writer = {None: "not quantized", "unknown": "quantized in an unknown way"}.get(
        data["writer"], data["writer"]
    )
    model = data["model"] or "a model this command has no name for"
    if not data["layers"] and not data["plain_tensors"]:
        writer, loads = "holds no tensors", "nothing to load"
    console.print(f"{options.file.name}: {writer}; {loads}; {model}")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("format", "layers", "size", "rotation", "loads as", "ComfyUI alone"):
        table.add_column(name, justify="right" if name in ("layers", "size") else "left")
    for row in group_layers(data):
        size = _megabytes(row["bytes"])
        rotation = str(row["group_size"] or "none")
        table.add_row(
            row["format"], str(row["layers"]), size, rotation, row["loads_as"], row["stock"]
        )
    if data["layers"]:
        console.print(table)
    console.print(f"plain tensors: {data['plain_tensors']}, {_megabytes(data['plain_bytes'])}")
    for note in data["notes"]:
        console.print(f"note: {note}")
    for fault in data["faults"]:
        console.print(
            f"fault: {fault['layer']}: {fault['fault']}; {fault['remedy']}",
            style="red",
        )
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


def _demo(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from .demo.run import run_demo  # loads the model's code only when asked for

    _make_writable(options.out)
    with console.status("starting") as status:
        result = run_demo(options.out, lambda name: status.update(f"drawing digits: {name}"))
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
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = ("format", "layers", "weights", "worst SQNR", "PSNR", "s/step", "read right")
    for name in columns:
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    table.add_row(
        "bf16 (source)",
        "",
        _megabytes(source["bytes"]),
        "",
        "",
        f"{source['seconds_per_step']:.3f}",
        f"{source['digits_read']} of {source['digits']}",
    )
    for row in data["formats"]:
        psnr = row["psnr_db"]
        table.add_row(
            row["format"],
            f"{row['layers_quantized']} of {row['layers_quantized'] + row['layers_kept']}",
            _megabytes(row["bytes_after"]),
            f"{row['worst_sqnr_db']:.1f} dB",
            "exact" if psnr is None else f"{psnr:.1f} dB",
            f"{row['seconds_per_step']:.3f}",
            f"{row['digits_read']} of {source['digits']}",
        )
    return table


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def _doctor(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    findings = doctor.examine()
    for finding in findings:
        mark, style = ("ok", "green") if finding.ok else ("--", "yellow")
        remedy = f" ({finding.remedy})" if finding.remedy else ""
        console.print(f"{mark}  ", style=style, end="")
        line = f"{finding.subject}: {finding.text}{remedy}"
        console.print(line)
    return doctor.as_json(findings)


if __name__ == "__main__":
    sys.exit(main())
