"""The command line: the same capabilities without ComfyUI."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console

from .commands.bench import add_bench
from .commands.cache import add_cache
from .commands.demo import add_demo
from .commands.doctor import add_doctor
from .commands.inspect import add_inspect
from .commands.plan import add_plan
from .commands.quantize import add_quantize
from .loaders.errors import CacheError, CheckpointError
from .quant.errors import QuantError

PIPE_WIDTH = 10_000
DONE, OUR_FAULT, USERS_FAULT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0 when done, 2 when the input is wrong, 1 for a fault of ours."""
    options = _parser().parse_args(arguments)
    # With --json, stdout carries the JSON object and nothing else.
    console, errors = _console(options.json), _console(True)
    try:
        result = options.run(options, console)
    except (QuantError, CheckpointError, CacheError, OSError) as error:
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
    for add in (
        add_demo,
        add_quantize,
        add_inspect,
        add_doctor,
        add_bench,
        add_plan,
        add_cache,
    ):
        add(commands).add_argument(
            "--json", action="store_true", help="print one JSON object on stdout, nothing else"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
