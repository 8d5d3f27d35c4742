"""What the CUDA backend refuses, decided from numbers alone."""

from __future__ import annotations

import pytest
import torch
from leandit.kernels.backend import LinearRequest
from leandit.kernels.backends.cuda import CudaBackend, why_shape_refused


def request(**changes: object) -> LinearRequest:
    values = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "m": 33,
        "n": 77,
        "k": 2688,
        "group_size": 64,
    }
    return LinearRequest(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float64}, "takes float32, float16 and bfloat16"),
        ({"group_size": 128}, "groups of 16, 64 or 256, not 128"),
        ({"k": 2690, "group_size": None}, "K divisible by 16"),
        ({"k": 2688, "group_size": 256}, "by the group, K=2688"),
        ({"k": 65_536}, "at most 32768 values"),
    ],
)
def test_what_the_kernels_do_not_cover_is_refused_in_words(changes, words: str) -> None:
    assert words in (why_shape_refused(request(**changes)) or "")


def test_ragged_rows_and_columns_are_taken() -> None:
    assert why_shape_refused(request()) is None
    assert why_shape_refused(request(m=1, n=1, k=16, group_size=16)) is None


def test_other_devices_are_refused() -> None:
    reason = CudaBackend(None).refuses(request(device="cpu"))
    assert reason == "runs on NVIDIA cards only, the tensors are on cpu"


def test_a_missing_cuda_core_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from leandit.kernels.backends import cuda

    monkeypatch.setattr(cuda, "cuda_core_missing", lambda: "cuda.core is not installed: pip ...")
    assert "pip" in (CudaBackend(None).refuses(request()) or "")
