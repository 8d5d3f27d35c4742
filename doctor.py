"""What this machine can run, and why not: one finding a line, with the remedy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .kernels.backend import LinearRequest, NoBackendError
from .kernels.backends.kitchen import kitchen_missing, linear_route
from .kernels.cuda.compiler import INSTALL_LINE, cuda_core_missing
from .kernels.dispatch import LinearSettings
from .kernels.linear_dispatch import dispatcher_for

OPTIONAL_PACKAGES = {
    "triton": ("compiled kernels", "pip install triton (Windows: pip install triton-windows)"),
    "sageattention": ("quantized attention", "pip install sageattention"),
    "flash_attn": ("flash attention", "pip install flash-attn --no-build-isolation"),
}
"""Import name of each optional package, what it brings, and how to install it."""

MIN_TENSOR_CORE_CAPABILITY = (7, 5)
"""First NVIDIA generation (Turing) with INT8 tensor cores."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. ok is False where something is missing; remedy is "" if none."""

    subject: str
    ok: bool
    text: str
    remedy: str = ""


def examine() -> tuple[Finding, ...]:
    """Everything the doctor looks at, in the order it is shown."""
    return (
        Finding("python", True, f"{platform.python_version()} on {platform.platform()}"),
        _torch(),
        _gpu(),
        _int8_linear(),
        _own_kernels(),
        *_kitchen(),
        *(_package(name, *rest) for name, rest in OPTIONAL_PACKAGES.items()),
        _comfyui(),
    )


def as_json(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The findings as plain data."""
    return {"findings": [asdict(finding) for finding in findings]}


def _torch() -> Finding:
    built_for = torch.version.cuda
    if torch.version.hip is not None:
        return Finding("torch", True, f"{torch.__version__}, built for ROCm {torch.version.hip}")
    if built_for is None:
        return Finding(
            "torch",
            not torch.cuda.is_available(),
            f"{torch.__version__}, built without CUDA",
            "for an NVIDIA card install a torch built for CUDA 13 (pytorch.org, Get Started)",
        )
    if int(built_for.split(".")[0]) < 13:
        return Finding(
            "torch",
            False,
            f"{torch.__version__}, built for CUDA {built_for}: ComfyUI switches off "
            "comfy-kitchen's CUDA kernels below CUDA 13",
            "install a torch built for CUDA 13 (pytorch.org, Get Started)",
        )
    return Finding("torch", True, f"{torch.__version__}, built for CUDA {built_for}")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding(
            "gpu",
            False,
            "no CUDA device: every format runs, on the CPU, slowly",
            "an NVIDIA card of the Turing generation or newer",
        )
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        return Finding("gpu", True, f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB")
    capability = (properties.major, properties.minor)
    text = (
        f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, "
        f"compute capability {properties.major}.{properties.minor}"
    )
    if capability < MIN_TENSOR_CORE_CAPABILITY:
        return Finding("gpu", False, f"{text}: has no INT8 tensor cores", "a Turing or newer card")
    return Finding("gpu", True, text)


def _sample_request() -> LinearRequest:
    """A linear of a size common in diffusion transformers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LinearRequest(device, torch.bfloat16, m=4096, n=4096, k=4096, group_size=256)


def _int8_linear() -> Finding:
    try:
        decision = dispatcher_for(LinearSettings()).decide(_sample_request())
    except NoBackendError as error:
        return Finding("int8 linear", False, str(error))
    reasons = "; ".join(f"not {name}: {why}" for name, why in decision.refusals.items())
    name = decision.candidate.backend.name
    text = "; ".join(filter(None, (f"Row-Split Linear runs {name}", reasons)))
    return Finding("int8 linear", True, text)


def _own_kernels() -> Finding:
    missing = cuda_core_missing()
    subject = "leandit-cuda"
    if missing is None:
        return Finding(subject, True, "cuda-core is installed: kernels are compiled when needed")
    if not torch.cuda.is_available():
        return Finding(subject, False, "cuda-core is not installed; of use only with a GPU")
    return Finding(subject, False, "cuda-core is not installed", INSTALL_LINE)


def _kitchen() -> tuple[Finding, ...]:
    missing = kitchen_missing()
    if missing is not None:
        return (Finding("comfy-kitchen", False, missing, "pip install comfy-kitchen"),)
    version = importlib.metadata.version("comfy-kitchen")
    route = linear_route("TensorWiseINT8Layout", _sample_request())
    chosen = Finding(
        "comfy-kitchen",
        bool(route.backend),
        f"{version}, runs INT8 linears with its {route.backend or 'no'} backend "
        "(ComfyUI switches triton off unless told, and cuda below CUDA 13)",
    )
    others = (
        Finding(f"comfy-kitchen {name}", False, reason) for name, reason in route.refusals.items()
    )
    return (chosen, *others)


def _package(name: str, brings: str, install: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        if not torch.cuda.is_available():
            return Finding(name, False, f"not installed ({brings}); of use only with a GPU")
        return Finding(name, False, f"not installed ({brings})", install)
    try:
        version = importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Finding(name, True, f"{version} ({brings})")


def _comfyui() -> Finding:
    places = _comfyui_places()
    for folder in places:
        if (folder / "comfy" / "model_patcher.py").is_file():
            return Finding("ComfyUI", True, f"found at {folder}")
    return Finding(
        "ComfyUI",
        False,
        f"not found at {' or '.join(map(str, places))}",
        "set COMFYUI_PATH to its folder; the command line works without it",
    )


def comfyui_version() -> tuple[int, ...] | None:
    """The version of the ComfyUI that is found, or None."""
    for folder in _comfyui_places():
        file = folder / "comfyui_version.py"
        found = file.is_file() and re.search(r'"(\d+)\.(\d+)\.(\d+)', file.read_text("utf-8"))
        if found:
            return tuple(int(part) for part in found.groups())
    return None


def _comfyui_places() -> tuple[Path, ...]:
    """A COMFYUI_PATH that is set decides alone."""
    named = os.environ.get("COMFYUI_PATH")
    if named:
        return (Path(named),)
    places = [Path.home() / "ComfyUI"]
    checkout = Path(__file__).resolve().parent
    if checkout.parent.name == "custom_nodes":
        places.insert(0, checkout.parent.parent)
    return tuple(places)
