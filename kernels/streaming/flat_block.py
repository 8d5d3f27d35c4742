"""The tensors of one block, laid out in one flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 256
"""Bytes to whose multiples tensors start: what CUDA's own allocations have."""

SMALL_BYTES = 1 << 18
"""Tensors up to this size, such as scales and biases, are packed and copied in one go."""


@dataclass(frozen=True)
class Piece:
    """Bytes on the host, uint8 and flat, and where in the buffer they go. packed: whether they are a
    copy of small tensors, which nobody else holds."""

    offset: int
    source: torch.Tensor
    packed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.source.numel()


class FlatBlock:
    """Where each tensor of a block lies in a buffer. Large masters are not copied on the host."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """
        Args:
            tensors: of one block on the host, each as `can_stream` wants it.
        """
        self._tensors = tuple(tensors)
        parts = [part for tensor in self._tensors for part in _parts(tensor)]
        small = [part.nbytes <= SMALL_BYTES for part in parts]
        self._offsets: list[int] = [0] * len(parts)
        position = packed = 0
        for index in sorted(range(len(parts)), key=lambda index: not small[index]):
            self._offsets[index] = position
            position += -(-parts[index].nbytes // ALIGNMENT) * ALIGNMENT
            packed = position if small[index] else packed
        self.nbytes = position
        self._packed = torch.zeros(packed, dtype=torch.uint8)
        large = []
        for offset, part, is_small in zip(self._offsets, parts, small, strict=True):
            if is_small:
                self._packed[offset : offset + part.nbytes].copy_(_as_bytes(part))
            else:
                large.append(Piece(offset, _as_bytes(part)))
        self._large = tuple(large)

    def pieces(self) -> tuple[Piece, ...]:
        """What to copy into a buffer so that `tensors_in` finds the block there."""
        return (*((Piece(0, self._packed, True),) if self._packed.numel() else ()), *self._large)

    def tensors_in(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The block's tensors over a buffer: same types, dtypes, shapes and attributes as given.

        Args:
            buffer: uint8, at least `nbytes` long, on any device.
        """
        offsets = iter(self._offsets)
        return [_over(tensor, buffer, offsets) for tensor in self._tensors]


def can_stream(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be laid out: its parts are contiguous, and hold values."""
    if tensor.layout != torch.strided:
        return False
    parts = list(_parts(tensor))
    return bool(parts) and all(
        not part.is_meta and part.numel() > 0 and part.is_contiguous() for part in parts
    )


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor as it is held, scales included."""
    return sum(part.nbytes for part in _parts(tensor))


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that make up a tensor, in a fixed order."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor.detach().as_subclass(torch.Tensor)


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1).view(torch.uint8)


def _over(tensor: Any, buffer: torch.Tensor, offsets: Iterator[int]) -> Any:
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = {name: _over(getattr(tensor, name), buffer, offsets) for name in names}
        made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    else:
        raw = tensor.detach().as_subclass(torch.Tensor)
        offset = next(offsets)
        made = buffer[offset : offset + raw.nbytes].view(raw.dtype).view(raw.size())
        if type(tensor) is torch.nn.Parameter:
            return torch.nn.Parameter(made, requires_grad=False)
        if type(tensor) is not torch.Tensor:
            # Packed tensors of other packages (GGUF) keep what they are in attributes.
            made = made.as_subclass(type(tensor))
            made.__dict__.update(tensor.__dict__)
    if isinstance(tensor, torch.nn.Parameter):
        made._is_param = True  # what Parameter does to tensors of another class, without a copy
    return made
