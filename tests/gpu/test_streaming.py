"""Streaming on a card: the bytes are right, whatever the card does in the meantime."""

from __future__ import annotations

import pytest
import torch
from leandit.kernels.streaming.cuda_device import CudaStreamingDevice
from leandit.kernels.streaming.flat_block import FlatBlock
from leandit.kernels.streaming.ring import BlockRing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCKS, WIDTH = 12, 1024


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_outputs_are_those_of_resident_weights(slots: int, pinned: bool) -> None:
    torch.manual_seed(0)
    masters = [[torch.randn(WIDTH, WIDTH) / 32, torch.randn(WIDTH)] for _ in range(BLOCKS)]
    if pinned:
        masters = [[tensor.pin_memory() for tensor in block] for block in masters]
    on_card = [[tensor.cuda() for tensor in block] for block in masters]
    x = torch.randn(4096, WIDTH, device="cuda")
    expected = x
    for weight, bias in on_card:
        expected = torch.nn.functional.linear(expected, weight, bias).tanh()
    device = torch.device("cuda", 0)
    flat = [FlatBlock(block) for block in masters]
    before = torch.cuda.memory_allocated()
    with BlockRing(
        CudaStreamingDevice(device, flat), [b.nbytes for b in flat], [True] * BLOCKS, slots
    ) as ring:
        for _ in range(20):
            ring.begin_forward()
            h = x
            for index, block in enumerate(flat):
                buffer = ring.enter(index)
                assert buffer is not None
                weight, bias = block.tensors_in(buffer)
                h = torch.nn.functional.linear(h, weight, bias).tanh()
                ring.leave(index)
            assert torch.equal(h, expected)
    del buffer, weight, bias, h
    assert torch.cuda.memory_allocated() <= before
