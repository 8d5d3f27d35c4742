"""The INT8 linear on an NVIDIA card: correctness, then speed beside the peers and two ceilings.

    python benchmarks/gpu_linear.py [--json FILE]

Takes less than four minutes. First the package's `gpu` tests run. Then, on the shapes of MiniMax H3,
Wan 14B, Flux and Krea 2: torch bf16, the bare int8 product, comfy-kitchen whole and split by rows,
and this package's kernels; every one in turns, the best of five. The ceilings are copying a tensor on
the card, and the best int8 product that was seen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from leandit.bench.linear import bench_linear
from leandit.bench.machine import machine
from leandit.bench.shapes import ON_GPU
from leandit.bench.timing import best_milliseconds
from leandit.kernels.cuda.compiler import cuda_core_missing
from leandit.kernels.cuda.launch import CudaKernels

TESTS = Path(__file__).resolve().parent.parent / "tests/gpu"
COPY_BYTES = 1 << 30


def copy_gb_per_s() -> float:
    """Bytes read and written in a second when a gigabyte is copied."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = best_milliseconds(lambda: target.copy_(source), target.device, 6)
    return 2 * COPY_BYTES / milliseconds / 1e6


def quantizer_gb_per_s() -> dict[str, float]:
    """Bytes that the fused quantizer reads and writes in a second, by shape."""
    kernels = CudaKernels(torch.device("cuda", 0), None)
    found = {}
    for m, k in ((32_700, 5376), (32_700, 13_824), (4096, 3072)):
        x = torch.randn(m, k, device="cuda").bfloat16()
        milliseconds = best_milliseconds(lambda x=x: kernels.rotate_quantize(x, 256), x.device, 6)
        found[f"{m} x {k}"] = 3 * m * k / milliseconds / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    command = [sys.executable, "-m", "pytest", "-q", str(TESTS)]
    tests = subprocess.run(command, capture_output=True, text=True)
    print(tests.stdout[-2000:])
    rows = bench_linear(ON_GPU, "cuda")
    best = max(row.tops for row in rows if "int8 product" in row.backend)
    print(
        f"{'M':>6} {'N':>6} {'K':>6} {'what':26} {'rows':>6} {'ms':>8} {'TOP/s':>7} of best error"
    )
    for row in rows:
        error = "" if row.rel_error is None else f"{row.rel_error:.4f}"
        print(
            f"{row.m:6} {row.n:6} {row.k:6} {row.backend:26} {row.rows_per_call:6} {row.ms:8.2f} "
            f"{row.tops:7.1f} {row.tops / best:7.2f} {error}"
        )
    copying, quantizing = copy_gb_per_s(), {}
    if cuda_core_missing() is None:
        quantizing = quantizer_gb_per_s()
    print(f"copying: {copying:.0f} GB/s")
    for shape, rate in quantizing.items():
        print(f"rotate and quantize {shape}: {rate:.0f} GB/s, {rate / copying:.2f} of copying")
    if options.json:
        data = {
            "machine": machine(),
            "tests_passed": tests.returncode == 0,
            "copy_gb_per_s": copying,
            "rotate_quantize_gb_per_s": quantizing,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
