"""Attention backends on a card, against torch's. Which of them run depends on what is installed:

pip install sageattention flash-attn
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from leandit.bench.attention import AttentionShape, clustered
from leandit.kernels.attention.backends import attention_backends
from leandit.kernels.attention.contract import SparseOptions
from leandit.kernels.attention.quality import measure_quality
from leandit.kernels.attention.request import request_of
from leandit.kernels.attention.sdpa import Sdpa

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = [AttentionShape(4, 300, 64), AttentionShape(24, 4608, 128), AttentionShape(8, 16_384, 128)]


@pytest.mark.parametrize("name", list(attention_backends()))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.tokens} of {shape.head_dim}")
def test_a_backend_that_does_not_refuse_is_within_its_bound(name: str, shape: Any) -> None:
    backend = attention_backends()[name]
    q, k, v = clustered(shape, torch.device("cuda"))
    reason = backend.refuses(request_of(q, k, v, None, None))
    if reason is not None:
        pytest.skip(reason)
    before = [tensor.clone() for tensor in (q, k, v)]
    out = backend.attention(q, k, v, None, None, SparseOptions())
    assert out.shape == q.shape
    quality = measure_quality(out, q, k, v, None, None, backend.kind)
    assert not quality.broken, quality
    assert all(torch.equal(*pair) for pair in zip((q, k, v), before, strict=True))


def test_everything_exact_is_dense_attention() -> None:
    backend = attention_backends()["sol_attn"]
    q, k, v = clustered(AttentionShape(4, 2048, 128), torch.device("cuda"))
    reason = backend.refuses(request_of(q, k, v, None, None))
    if reason is not None:
        pytest.skip(reason)
    out = backend.attention(q, k, v, None, None, SparseOptions(tau=-100.0))
    exact = Sdpa().attention(q.float(), k.float(), v.float(), None, None, SparseOptions())
    assert (out.float() - exact).norm() < 0.05 * exact.norm()
