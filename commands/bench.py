"""`leandit bench NAME`: arguments, table and JSON."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..bench import attention
from ..bench.attention import AttentionRow, AttentionShape, bench_attention
from ..bench.linear import BARE_INT8, BF16, LinearRow, bench_linear
from ..bench.machine import machine
from ..bench.offload import OffloadRow, bench_offload
from ..bench.shapes import ON_CPU, ON_GPU, LinearShape, parse_shapes, parse_sides
from ..bench.streaming import StreamingRow, bench_streaming
from ..quant.errors import SettingsError
from ..quant.offload_plan import CARDS
from .tables import table

SIMULATED = (
    "Simulated, from assumed speeds of cards: a model of 60 blocks and 30 billion weights, copied at 27 "
    "GB/s (13 with 8 lanes). compute: a step without copying; plan: by formula; simulated: resident "
    "blocks evenly spaced; contiguous: the same number in a row; copies: what they cost."
)


def add_bench(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the command line's parsers."""
    measure = commands.add_parser("bench", help="measure what is fastest on this machine")
    measure.add_argument("name", choices=["linear", "attention", "offload"], help="what to measure")
    measure.add_argument(
        "--shapes",
        default="",
        metavar="AxBxC,...",
        help="linear: rows x out_features x in_features; attention: heads x tokens x width of a "
        "head. Default: layers of MiniMax H3, Wan, Flux and Krea 2",
    )
    measure.set_defaults(run=run_bench)
    return measure


def run_bench(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure, print the table, and give the JSON form.

    Raises:
        SettingsError: for a shape that is none.
    """
    if options.shapes and options.name == "offload":
        raise SettingsError("--shapes is for linear and attention; offload has one model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with console.status("measuring") as status:
        if options.name == "linear":
            rows: Any = bench_linear(
                _linear_shapes(options.shapes, device),
                device,
                lambda s: status.update(f"measuring {s.m} x {s.n} x {s.k}"),
            )
        elif options.name == "offload":
            rows = bench_offload(CARDS, lambda card: status.update(f"simulating {card}"))
        else:
            rows = bench_attention(
                _attention_shapes(options.shapes, device),
                device,
                lambda s: status.update(f"measuring {s.heads} heads, {s.tokens} tokens"),
            )
    if options.name == "offload":
        console.print(SIMULATED)
    tables = {"linear": _linear_table, "attention": _attention_table, "offload": _offload_table}
    console.print(tables[options.name](rows))
    data = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    if options.name == "offload" and device == "cuda":
        measured = bench_streaming(torch.device(device))
        console.print(_streaming_table(measured))
        data["measured"] = [asdict(row) for row in measured]
    return data


def _offload_table(rows: list[OffloadRow]) -> Table:
    made = table(("card", "what", "resident", "streamed GB", "compute s", "plan s", "simulated s",
        "contiguous s", "copies"), left=("what",), wrap=False)  # fmt: skip
    for row in rows:
        copies = "hidden" if row.hidden else f"{row.seconds / row.compute_seconds:.2f}x"
        times = (row.compute_seconds, row.seconds, row.simulated, row.contiguous)
        shown = [f"{row.resident} of {row.blocks}", f"{row.streamed_gb:.1f}"]
        shown += [f"{time:.2f}" for time in times]
        made.add_row(
            row.card,
            f"{row.format}, {row.work}",
            *(shown if row.fits else [""] * len(shown)),
            copies if row.fits else "does not fit",
        )
    return made


def _streaming_table(rows: list[StreamingRow]) -> Table:
    columns = ("tokens", "resident", "streamed GB", "GB/s", "compute s", "plan s", "measured s")
    made = table((*columns, "copied when needed s", "hidden"), left=(), wrap=False)
    for row in rows:
        times = (row.compute_seconds, row.plan_seconds, row.seconds, row.unplanned_seconds)
        made.add_row(
            str(row.tokens),
            f"{row.resident} of {row.blocks}",
            f"{row.streamed_bytes / 1e9:.2f}",
            f"{row.gb_per_s:.1f}",
            *(f"{time:.4f}" for time in times),
            f"{row.overlap:.0%}",
        )
    return made


def _linear_shapes(text: str, device: str) -> tuple[LinearShape, ...]:
    if not text:
        return ON_GPU if device == "cuda" else ON_CPU
    try:
        return parse_shapes(text)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _attention_shapes(text: str, device: str) -> tuple[AttentionShape, ...]:
    if not text:
        return attention.ON_GPU if device == "cuda" else attention.ON_CPU
    try:
        return tuple(AttentionShape(*sides) for sides in parse_sides(text))
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _linear_table(rows: list[LinearRow]) -> Table:
    made = table(
        ("M", "N", "K", "what", "rows a call", "ms", "TOP/s", "x bf16", "of int8", "error"),
        left=("what",),
        wrap=False,
    )
    for row in rows:
        shape = (row.m, row.n, row.k)
        times = {r.backend: r.ms for r in rows if (r.m, r.n, r.k) == shape}
        error = "" if row.rel_error is None else f"{row.rel_error:.4f}"
        against = [
            f"{times[name] / row.ms:.2f}" if name in times else "" for name in (BF16, BARE_INT8)
        ]
        numbers = (f"{row.ms:.1f}", f"{row.tops:.2f}", *against, error)
        made.add_row(*map(str, shape), row.backend, str(row.rows_per_call), *numbers)
    return made


def _attention_table(rows: list[AttentionRow]) -> Table:
    made = table(
        ("heads", "tokens", "width", "what", "ms", "TFLOP/s", "error", "why not"),
        left=("what",),
        wrap=False,
    )
    for row in rows:
        numbers = ["", "", ""]
        if row.ms is not None and row.tflops is not None and row.rel_error is not None:
            numbers = [f"{row.ms:.1f}", f"{row.tflops:.2f}", f"{row.rel_error:.5f}"]
        sides = (str(row.heads), str(row.tokens), str(row.head_dim))
        made.add_row(*sides, row.backend, *numbers, row.refusal)
    return made
