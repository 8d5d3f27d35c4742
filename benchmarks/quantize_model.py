"""Speed and peak memory of quantizing a MODEL of more than 1 GB in a real ComfyUI, on the CPU.

    python benchmarks/quantize_model.py --comfyui PATH [--json FILE]

The model is one double and two single blocks of Flux at their real size, with random weights. The
table puts the node's speed beside comfy-kitchen's eager quantizer on the same weights and beside
the ceiling, a conversion of the weights to float32 and nothing else. Memory is the resident set:
the peak above the source, less the result, in float32 copies of the largest layer. The C library
is told to return freed blocks at once; by itself it keeps some, and the resident set then shows
what it keeps and not what is in use.

The last columns are of the cache on the disk: the first time, which quantizes and writes; the second,
which looks up and verifies; and its ceiling, reading a file of that size and summing it up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from leandit.bench.machine import machine

FORMATS = ("int8_convrot", "int8", "w4a8_convrot", "w4a4_convrot")
SAMPLE_SECONDS = 0.002
RETURN_FREED_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 23)}
"""glibc reads it at start; other C libraries ignore it."""


class PeakMemory:
    """Resident set of this process, sampled in a thread while the block runs."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._process = psutil.Process()
        self.before = self.peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def build_source() -> Any:
    """A ModelPatcher over one double and two single blocks of Flux, bf16."""
    import comfy.model_patcher
    import comfy.supported_models

    config = {
        "image_model": "flux",
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 768,
        "context_in_dim": 4096,
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
        "txt_ids_dims": [],
    }
    model_config = comfy.supported_models.Flux(config)
    model_config.set_inference_dtype(torch.bfloat16, torch.float32)
    cpu = torch.device("cpu")
    model = model_config.get_model({}, "", device=cpu)
    for parameter in model.diffusion_model.parameters():
        parameter.data = torch.empty_like(parameter).normal_(std=0.02)
    return comfy.model_patcher.ModelPatcher(model, cpu, cpu)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(source: Any, format: str) -> dict[str, Any]:
    """One row: speed, peak memory, and the two yardsticks on the same weights."""
    from comfy_kitchen.backends.eager import convrot_w4a4, quantization, w4a8_int8
    from leandit.host.quantize import quantize_model
    from leandit.loaders.weight_cache import WeightCache
    from leandit.quant.settings import settings_from

    settings = settings_from(format)
    with PeakMemory() as memory:
        quantized, report = quantize_model(source, settings)
    layers = [layer for layer in report.layers if layer["format"]]
    selected = {layer["name"]: layer["group_size"] for layer in layers}
    read = sum(layer["bytes_before"] for layer in layers)
    result = sum(layer["bytes"] for layer in layers)
    largest = max(layer["shape"][0] * layer["shape"][1] for layer in layers) * 4
    del quantized
    with tempfile.TemporaryDirectory() as folder:
        cache = WeightCache(Path(folder))
        first = seconds(lambda: quantize_model(source, settings, cache="disk", weight_cache=cache))
        gc.collect()
        second = seconds(lambda: quantize_model(source, settings, cache="disk", weight_cache=cache))
        gc.collect()
        (path,) = cache.folder.glob("*.safetensors")
        reading = seconds(lambda: zlib.crc32(path.read_bytes()))

    kitchen = {
        "int8_convrot": quantization.quantize_int8_convrot_weight,
        "int8": lambda weight, group: quantization.quantize_int8_rowwise(weight),
        "w4a8_convrot": lambda weight, group: w4a8_int8.quantize_w4a8_int8_weight(
            weight, convrot_groupsize=group
        ),
        "w4a4_convrot": convrot_w4a4.quantize_convrot_w4a4_weight,
    }[format]
    modules = dict(source.model.diffusion_model.named_modules())

    def peer() -> None:
        for name, group in selected.items():
            kitchen(modules[name].weight.float(), group)

    def ceiling() -> None:
        for name in selected:
            modules[name].weight.float()

    return {
        "format": format,
        "layers": len(layers),
        "source_gb": read / 1e9,
        "gb_per_s": read / 1e9 / report.summary["seconds"],
        "kitchen_eager_gb_per_s": read / 1e9 / seconds(peer),
        "to_float32_gb_per_s": read / 1e9 / seconds(ceiling),
        "peak_float_copies": (memory.peak - memory.before - result) / largest,
        "cache_first_seconds": first,
        "cache_second_seconds": second,
        "read_and_sum_seconds": reading,
        "memory_seconds": report.summary["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comfyui", type=Path, default=Path.home() / "ComfyUI")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    sys.path.insert(0, str(options.comfyui))
    from comfy.cli_args import args

    args.cpu = True
    with torch.inference_mode():
        source = build_source()
        measure(source, "w4a4_convrot")  # warm up: libraries, threads, allocator
        rows = [measure(source, format) for format in FORMATS]
    print(
        "format         source GB  node GB/s  kitchen GB/s  to float32 GB/s  float copies at peak  "
        "in memory s  cache first s  second s  reading s"
    )
    for row in rows:
        print(
            f"{row['format']:14} {row['source_gb']:9.2f} {row['gb_per_s']:10.2f} "
            f"{row['kitchen_eager_gb_per_s']:13.2f} {row['to_float32_gb_per_s']:16.2f} "
            f"{row['peak_float_copies']:21.2f} {row['memory_seconds']:12.2f} "
            f"{row['cache_first_seconds']:14.2f} {row['cache_second_seconds']:9.2f} "
            f"{row['read_and_sum_seconds']:10.2f}"
        )
    if options.json:
        data = {"machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if not RETURN_FREED_BLOCKS.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | RETURN_FREED_BLOCKS)
    main()
