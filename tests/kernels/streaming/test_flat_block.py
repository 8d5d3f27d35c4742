"""Tensors laid out in one buffer come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from leandit.kernels.streaming.flat_block import (
    ALIGNMENT,
    SMALL_BYTES,
    FlatBlock,
    can_stream,
    stored_bytes,
)
from leandit.quant.formats import FORMATS
from leandit.quant.native import to_quantized_tensor
from leandit.quant.weight import quantize_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def filled(block: FlatBlock, length: int | None = None) -> torch.Tensor:
    """A buffer after the copies of the block's pieces."""
    buffer = torch.full((length or block.nbytes,), 0xFF, dtype=torch.uint8)
    for piece in block.pieces():
        buffer[piece.offset : piece.offset + piece.nbytes] = piece.source
    return buffer


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 40), min_size=0, max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_any_tensors_come_back_bit_for_bit(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [torch.randn(shape).to(dtype) for dtype, shape in kinds]
    block = FlatBlock(tensors)
    back = block.tensors_in(filled(block, block.nbytes + 1000))
    assert [raw(one) for one in back] == [raw(one) for one in tensors]
    assert [(t.dtype, t.shape) for t in back] == [(t.dtype, t.shape) for t in tensors]
    assert block.nbytes % ALIGNMENT == 0


def test_small_tensors_travel_together_and_large_ones_are_not_copied_on_the_host() -> None:
    large = torch.randn(SMALL_BYTES // 4 + 1)
    tensors = [torch.randn(3), large, torch.randn(5), torch.randn(7, 7)]
    block = FlatBlock(tensors)
    pieces = block.pieces()
    assert [piece.packed for piece in pieces] == [True, False]
    assert pieces[1].source.data_ptr() == large.data_ptr()
    assert pieces[0].nbytes == 3 * ALIGNMENT
    assert pieces[1].offset == pieces[0].nbytes


@pytest.mark.parametrize("extra", [-1, 0, 1], ids=["smaller", "just as large", "larger"])
def test_tensors_about_the_size_of_what_is_packed_come_back(extra: int) -> None:
    tensors = [
        torch.arange(SMALL_BYTES + extra, dtype=torch.int64).to(torch.uint8),
        torch.ones(3),
    ]
    block = FlatBlock(tensors)
    assert [raw(one) for one in block.tensors_in(filled(block))] == [raw(one) for one in tensors]
    assert [piece.packed for piece in block.pieces()] == ([True] if extra <= 0 else [True, False])


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_keep_layout_codes_and_scales(name: str) -> None:
    weight = quantize_weight(torch.randn(64, 256), FORMATS[name], 64 if "convrot" in name else None)
    tensor: Any = torch.nn.Parameter(to_quantized_tensor(weight, torch.bfloat16), False)
    block = FlatBlock([tensor])
    (back,) = block.tensors_in(filled(block))
    assert isinstance(back, torch.nn.Parameter)
    assert type(back) is type(tensor)
    assert back._layout_cls == tensor._layout_cls
    assert back._params.orig_dtype == torch.bfloat16
    assert torch.equal(back.dequantize(), tensor.dequantize())
    # All of it lies in the buffer: nothing is left on the host.
    assert stored_bytes(back) == stored_bytes(tensor) <= block.nbytes
    buffer = filled(block)
    (over,) = block.tensors_in(buffer)
    buffer.zero_()
    assert not over._qdata.any()
    assert not over._params.scale.float().any()


class Packed(torch.Tensor):
    """As packages make them: a plain tensor with what it stands for in attributes."""


def test_a_subclass_keeps_its_class_and_attributes() -> None:
    tensor: Any = torch.arange(10, dtype=torch.uint8).as_subclass(Packed)
    tensor.kind = ["Q4_K"]
    block = FlatBlock([tensor])
    (back,) = block.tensors_in(filled(block))
    assert type(back) is Packed
    assert back.kind is tensor.kind
    assert raw(back.as_subclass(torch.Tensor)) == bytes(range(10))


def test_a_parameter_stays_a_parameter_without_gradients() -> None:
    block = FlatBlock([torch.nn.Parameter(torch.ones(3))])
    (back,) = block.tensors_in(filled(block))
    assert type(back) is torch.nn.Parameter
    assert not back.requires_grad


@pytest.mark.parametrize(
    ("tensor", "streams"),
    [
        (torch.randn(4, 4), True),
        (torch.randn(4, 4).t(), False),
        (torch.empty(4, device="meta"), False),
        (torch.empty(0), False),
        (torch.randn(4, 4).to_sparse(), False),
    ],
    ids=["contiguous", "transposed", "without values", "empty", "sparse"],
)
def test_what_cannot_be_laid_out_is_known(tensor: torch.Tensor, streams: bool) -> None:
    assert can_stream(tensor) is streams
