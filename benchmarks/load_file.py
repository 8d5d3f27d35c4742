"""Time and memory of loading an int8 Flux of 2 GB, beside ComfyUI's own loader and safetensors.

    python benchmarks/load_file.py --comfyui ~/ComfyUI [--blocks 6] [--json FILE]

Every way of loading runs in a process of its own, three times, on a file the system has in its
cache; the median counts. "first run" is the time until every weight has been read once, which
weights mapped from a file leave for later. anonymous memory is what cannot be dropped and read
again. The ceiling is reading the file's bytes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from leandit.bench.machine import machine

FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56],
    "theta": 10_000,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
}
WAYS = ("bytes", "safetensors", "comfyui", "leandit")


def write_source(path: Path, blocks: int) -> None:
    """A Flux in bf16 with random weights, one tensor in memory at a time."""
    import comfy.ops
    from comfy.ldm.flux.model import Flux
    from leandit.loaders.stream import TensorSpec, write_stream

    with torch.device("meta"):
        model = Flux(**FLUX, depth=blocks, operations=comfy.ops.disable_weight_init)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    specs = [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]
    tensors = (
        (name, torch.empty(shape).uniform_(-0.03, 0.03, generator=generator).bfloat16())
        for name, shape in shapes.items()
    )
    write_stream(path, specs, {}, tensors)


def read_bytes(path: Path) -> list[torch.Tensor]:
    data = bytearray(path.stat().st_size)
    with path.open("rb") as file:
        file.readinto(data)
    return []


def load_safetensors(path: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(path).values())


def load_comfyui(path: Path) -> list[torch.Tensor]:
    import comfy.sd

    return _tensors(comfy.sd.load_diffusion_model(str(path)))


def load_leandit(path: Path) -> list[torch.Tensor]:
    from leandit.host.load import load_model

    return _tensors(load_model(path)[0])


def _tensors(patcher: Any) -> list[torch.Tensor]:
    values = (parameter.data for parameter in patcher.model.parameters())
    return [getattr(value, "_qdata", value) for value in values]


def measure(way: str, path: Path) -> dict[str, float]:
    """Seconds to load, seconds to read every weight once after it, and memory in GB."""
    ways: dict[str, Callable[[Path], list[torch.Tensor]]] = {
        "bytes": read_bytes,
        "safetensors": load_safetensors,
        "comfyui": load_comfyui,
        "leandit": load_leandit,
    }
    for module in {"comfyui": ("comfy.sd",), "leandit": ("leandit.host.load",)}.get(way, ()):
        importlib.import_module(module)  # not what is measured
    with torch.inference_mode():
        started = time.perf_counter()
        tensors = ways[way](path)
        loaded = time.perf_counter()
        for tensor in tensors:
            tensor.view(torch.uint8).max() if tensor.ndim else tensor.sum()
        ended = time.perf_counter()
    status = Path("/proc/self/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return {
        "load_seconds": loaded - started,
        "first_run_seconds": ended - loaded,
        "anonymous_gb": int(anonymous.split()[1]) * 1024 / 1e9,
    }


def run(options: argparse.Namespace, way: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--comfyui", str(options.comfyui), "--way", way, str(path)]
    runs = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {key: round(statistics.median(r[key] for r in runs), 3) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's folder")
    parser.add_argument("--blocks", type=int, default=6, help="double blocks; 6 make 2 GB")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("file", type=Path, nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.comfyui.expanduser()))
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()
    if options.way:
        print(json.dumps(measure(options.way, options.file)))
        return
    from leandit.loaders.convert import quantize_file
    from leandit.quant.settings import settings_from

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "bf16.safetensors", Path(folder) / "int8.safetensors"
        write_source(source, options.blocks)
        quantize_file(source, target, settings_from(preset="none"))
        source.unlink()
        size = target.stat().st_size / 1e9
        rows = [{"way": way, "file_gb": round(size, 3)} | run(options, way, target) for way in WAYS]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if options.json:
        data = {"machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
