"""What the backends refuse, and why."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from leandit.kernels.backend import LinearRequest
from leandit.kernels.backends import kitchen
from leandit.kernels.backends.kitchen import KitchenBackend, linear_route
from leandit.kernels.backends.reference import ReferenceBackend
from leandit.kernels.int8 import quantize_int8_rowwise

CPU = LinearRequest("cpu", torch.bfloat16, m=4096, n=512, k=1024, group_size=256)


@pytest.mark.parametrize(
    ("device", "m", "words"),
    [("mps", 4096, "no integer matrix product on mps"), ("cuda", 16, "needs M > 16")],
)
def test_the_reference_refuses(device: str, m: int, words: str) -> None:
    reason = ReferenceBackend().refuses(LinearRequest(device, torch.bfloat16, m, 512, 1024, None))
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("layout", sorted(kitchen.LINEAR_OPERATION))
def test_without_a_gpu_comfy_kitchen_runs_eager_and_says_why_not_cuda(layout: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    route = linear_route(layout, CPU)
    assert route.backend == "eager"
    assert "CUDA" in route.refusals["cuda"]


def test_a_missing_comfy_kitchen_is_said_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        kitchen.importlib.util,
        "find_spec",
        lambda name: None if name == "comfy_kitchen" else find_spec(name),
    )
    reason = KitchenBackend().refuses(CPU)
    assert reason is not None
    assert "pip install comfy-kitchen" in reason


@pytest.mark.parametrize("group", [None, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backends_agree_to_the_rounding_of_the_dtype(
    group: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 256, generator=generator).to(dtype)
    w, scale = quantize_int8_rowwise(torch.randn(48, 256, generator=generator))
    bias = torch.randn(48, generator=generator).to(dtype)
    ours = ReferenceBackend().linear(x, w, scale, bias, group)
    theirs = KitchenBackend().linear(x, w, scale, bias, group)
    assert theirs.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps * ours.abs().max()
    assert (ours - theirs).abs().max() <= tolerance
