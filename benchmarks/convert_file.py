"""Speed and peak memory of `leandit quantize` on a synthetic bf16 file of 2 GB.

    python benchmarks/convert_file.py [--gigabytes 2] [--json FILE]

Writes the file to a temporary folder, converts it in a process of its own, and puts the speed
beside comfy-kitchen's eager quantizer on the same weights (read with safetensors, nothing written)
and beside the ceiling, reading the file and writing half as many bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from leandit.bench.machine import machine
from safetensors import safe_open
from safetensors.torch import save_file

N, K, GROUP = 3072, 12288, 256


def write_source(path: Path, gigabytes: float) -> int:
    """A file of equal Linears in numbered blocks; returns its bytes of weights."""
    count = max(2, round(gigabytes * 1e9 / (N * K * 2)))
    generator = torch.Generator().manual_seed(0)
    block = (torch.randn(N, K, generator=generator) * 0.02).bfloat16()
    tensors = {f"blocks.{i}.mlp.weight": block.roll(i, 1).clone() for i in range(count)}
    save_file(tensors, path)
    return count * N * K * 2


def convert(source: Path, target: Path) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-m", "leandit", "quantize", str(source), str(target), "--json"]
    started = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - started, json.loads(run.stdout)


def kitchen_seconds(source: Path) -> float:
    from comfy_kitchen.backends.eager.quantization import quantize_int8_convrot_weight

    started = time.perf_counter()
    with safe_open(source, "pt") as file:
        for name in list(file.keys()):
            quantize_int8_convrot_weight(file.get_tensor(name).float(), GROUP)
    return time.perf_counter() - started


def copy_seconds(source: Path, target: Path) -> float:
    started = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(1 << 24):
            writer.write(chunk[: len(chunk) // 2])
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.safetensors"
        nbytes = write_source(source, options.gigabytes)
        wall, report = convert(source, Path(folder) / "out.safetensors")
        peer = kitchen_seconds(source)
        ceiling = copy_seconds(source, Path(folder) / "copy")
    row = {
        "source_gb": nbytes / 1e9,
        "convert_gb_per_s": nbytes / 1e9 / report["seconds"],
        "process_seconds": wall,
        "kitchen_eager_gb_per_s": nbytes / 1e9 / peer,
        "copy_gb_per_s": nbytes / 1e9 / ceiling,
        "peak_rss_gb": report["peak_rss_bytes"] / 1e9,
        "largest_tensor_gb": N * K * 2 / 1e9,
    }
    for name, value in row.items():
        print(f"{name:24} {value:8.3f}")
    if options.json:
        data = {"machine": machine(), "rows": [row]}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
