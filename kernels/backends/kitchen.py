"""comfy-kitchen, ComfyUI's kernel library, and the question which of its own backends would run."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from ..backend import LinearRequest
from ..integer_product import why_inexact_on_cpu
from ..row_split import SelectedConfig

LINEAR_OPERATION = {
    "TensorWiseINT8Layout": "int8_linear",
    "AsymW4A8Int8Layout": "w4a8_int8_linear",
    "TensorCoreConvRotW4A4Layout": "convrot_w4a4_linear",
}
"""Operation of comfy-kitchen's registry behind the linear of each of its layouts."""

INSTALL_LINE = "pip install comfy-kitchen"


def kitchen_missing() -> str | None:
    """Why comfy-kitchen cannot be used, or None if it is installed."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        return f"comfy-kitchen is not installed ({INSTALL_LINE})"
    return None


@dataclass(frozen=True)
class Route:
    """The comfy-kitchen backend that would run a linear, and why each preferred one does not.

    backend is "eager" where only its torch implementation can run, or "" where none can.
    """

    backend: str
    refusals: dict[str, str]


def linear_route(layout: str, request: LinearRequest) -> Route:
    """Ask comfy-kitchen's registry, in its own order of preference.

    Args:
        layout: name of a comfy-kitchen layout class, a key of `LINEAR_OPERATION`.
        request: the linear; its numbers are checked against each backend's declared limits.
    """
    missing = kitchen_missing()
    if missing is not None:
        return Route("", {"comfy-kitchen": missing})
    from comfy_kitchen.registry import registry  # first use of an optional backend

    operation = LINEAR_OPERATION[layout]
    arguments = _sample_arguments(operation, request)
    statuses = registry.list_backends()
    refusals: dict[str, str] = {}
    for name in _backends_of_this_torch():
        status = statuses.get(name)
        if status is None:
            continue
        if not status["available"]:
            refusals[name] = status["unavailable_reason"] or "not available on this machine"
        elif status["disabled"]:
            refusals[name] = _why_disabled(name)
        elif operation not in status["capabilities"]:
            refusals[name] = f"has no {operation}"
        else:
            verdict = registry.validate_backend_for_call(name, operation, arguments)
            if verdict.success:
                return Route(name, refusals)
            refusals[name] = f"{verdict.failed_param}: {verdict.failure_reason}"
    return Route("", refusals)


def selected_config() -> SelectedConfig | None:
    """comfy-kitchen's choice of CUTLASS configuration as a function, or None if it has none.

    It is private to comfy-kitchen (0.2.40 has it) and needs no GPU.
    """
    if kitchen_missing() is not None:
        return None
    from comfy_kitchen.backends import cuda  # first use of an optional backend

    return getattr(getattr(cuda, "_C", None), "cutlass_int8_selected_config", None)


def _backends_of_this_torch() -> tuple[str, ...]:
    """Names in comfy-kitchen's order of preference, without those for other vendors' torch."""
    npu = ("ascend",) if importlib.util.find_spec("torch_npu") else ()
    gpu = "cuda" if torch.version.hip is None else "hip"
    return (*npu, gpu, "triton", "eager")


def _why_disabled(name: str) -> str:
    """ComfyUI switches backends off at start; say which of its rules did."""
    if name == "cuda":
        built_for = torch.version.cuda
        if built_for is None:
            return "switched off: this torch is built without CUDA"
        return (
            f"switched off by ComfyUI: torch is built for CUDA {built_for}, "
            "its kernels need a torch built for CUDA 13 or newer"
        )
    if name == "triton":
        return "switched off by ComfyUI; start it with --enable-triton-backend to use it"
    return "switched off in this process"


def _sample_arguments(operation: str, request: LinearRequest) -> dict[str, object]:
    """Arguments of the request's dtypes, devices and shapes that take no memory (stride 0)."""
    device = request.device

    def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(1, dtype=dtype, device=device).expand(shape)

    n, k, group = request.n, request.k, request.group_size or 256
    x = filled((request.m, k), request.dtype)
    if operation == "int8_linear":
        return {
            "x": x,
            "weight": filled((n, k), torch.int8),
            "weight_scale": filled((n, 1), torch.float32),
            "bias": None,
            "out_dtype": request.dtype,
            "convrot": request.group_size is not None,
            "convrot_groupsize": group,
        }
    if operation == "w4a8_int8_linear":
        return {
            "x": x,
            "qdata": filled((n, k // 2), torch.int8),
            "s_rel": filled((n, k // 16), torch.float8_e4m3fn),
            "s_channel": filled((n,), torch.float32),
            "codebook": filled((16,), torch.float32),
            "correction": None,
            "bias": None,
            "group_size": 16,
            "convrot_groupsize": group,
            "out_dtype": request.dtype,
        }
    return {
        "x": x,
        "qweight": filled((n, k // 2), torch.int8),
        "wscales": filled((n,), torch.float32),
        "bias": None,
        "convrot_groupsize": group,
        "quant_group_size": 64,
        "linear_dtype": "int4",
    }


class KitchenBackend:
    """Runs the INT8 linear with whichever of comfy-kitchen's own backends it prefers."""

    name = "comfy-kitchen"

    def refuses(self, request: LinearRequest) -> str | None:
        """Refuses when comfy-kitchen is missing or none of its backends takes the request."""
        route = linear_route("TensorWiseINT8Layout", request)
        if route.backend == "eager" and request.device == "cpu":
            return why_inexact_on_cpu()
        if route.backend:
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in route.refusals.items())

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int | None,
    ) -> torch.Tensor:
        """`comfy_kitchen.int8_linear`, with the rotation when `group_size` is given."""
        import comfy_kitchen  # first use of an optional backend

        return comfy_kitchen.int8_linear(
            x,
            weight,
            weight_scale,
            bias,
            x.dtype,
            convrot=group_size is not None,
            convrot_groupsize=group_size or 256,
        )
