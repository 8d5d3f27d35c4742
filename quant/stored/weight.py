"""One weight as its file stores it, decoded row block by row block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

import torch

from ...kernels.hadamard import rotate
from . import codebook, grid
from .scheme import HADAMARD, Codebook, Scheme

GPU_BLOCK_ELEMENTS = 1 << 24
CPU_BLOCK_ELEMENTS = 1 << 18
"""Elements decoded at a time: on a GPU few launches count, on a CPU the cache does."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight (N, K) in the bytes its writer stored.

    tensors holds "payload" and "scale", and as the scheme needs "zero", "codebook",
    "nested_scale", "nested_codebook", "up" (N, R) and "down" (R, K). Shapes: see `Scheme`;
    payload and the blocks' tensors of a `Codebook` are flat.
    """

    scheme: Scheme
    shape: tuple[int, int]
    tensors: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def decode(weight: StoredWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The (N, K) weight in `dtype`; every step is computed in float32, in row blocks."""
    payload = weight.tensors["payload"]
    result = torch.empty(weight.shape, dtype=dtype, device=payload.device)
    for rows, block in decode_blocks(weight):
        result[rows] = block
    return result


def decode_blocks(weight: StoredWeight) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, float32 weight of these rows) for all rows in order."""
    scheme = weight.scheme
    codes = scheme.codes
    if isinstance(codes, Codebook):
        reader = codebook.prepare(weight.tensors, weight.shape, codes)
    else:
        reader = grid.prepare(weight.tensors, weight.shape, codes)
    for rows in _blocks(weight):
        block = reader(rows)
        if scheme.low_rank == "inside":
            block += _low_rank(weight, rows)
        if scheme.rotation is not None:
            hadamard = HADAMARD[scheme.rotation.kind]
            block = rotate(block, scheme.rotation.group_size, hadamard)
        if scheme.low_rank == "outside":
            block += _low_rank(weight, rows)
        yield rows, block


def _low_rank(weight: StoredWeight, rows: slice) -> torch.Tensor:
    return weight.tensors["up"][rows].float() @ weight.tensors["down"].float()


def _blocks(weight: StoredWeight) -> Iterator[slice]:
    n, k = weight.shape
    codes = weight.scheme.codes
    # A codebook's blocks run across rows: only now and then does a row begin where a block does.
    unit = lcm(codes.block, 2, k) // k if isinstance(codes, Codebook) else codes.block_rows
    on_cpu = weight.tensors["payload"].device.type == "cpu"
    elements = CPU_BLOCK_ELEMENTS if on_cpu else GPU_BLOCK_ELEMENTS
    step = max(1, elements // (unit * k)) * unit
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
