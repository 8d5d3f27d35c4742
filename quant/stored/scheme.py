"""What the bytes of a stored weight mean."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ...kernels.hadamard import regular_hadamard, sylvester_hadamard

HADAMARD = {"regular": regular_hadamard, "sylvester": sylvester_hadamard}


@dataclass(frozen=True)
class Rotation:
    """The rotation a weight is stored in: kind "regular" (ConvRot) or "sylvester" (QuaRot)."""

    kind: str
    group_size: int


@dataclass(frozen=True)
class Codebook:
    """4-bit indices into a table of 16 values, one scale per block of the flattened weight.

    `W.flatten()[i] = codebook[code[i]] * scale[i // block]`, high nibble first. With nested_block,
    the scales are 8-bit indices themselves:
    `scale[b] = nested_codebook[code[b]] * nested_scale[b // nested_block] + nested_offset`.
    Source: bitsandbytes' NF4 and FP4.
    """

    block: int
    nested_block: int | None = None
    nested_offset: float = 0.0


@dataclass(frozen=True)
class Grid:
    """8- or 4-bit integers with a scale per block of rows and columns.

    zero "none": `W = q * scale`; "added": `W = q * scale + zero`; "subtracted":
    `W = (q - zero) * scale`. scale and zero have the shape (N / block_rows, K / block_columns),
    rounded up; the last block of a row or column may be cut off.

    packing: "bytes" (N, K); "low_first": two codes a byte along the row, the even column in the
    low nibble; "row_halves": the weight as rows of one block each, cut into an upper half in the
    low nibbles and a lower half in the high ones (optimum-quanto).
    bias is what is subtracted from unsigned codes, such as 8 for 4 bits.
    """

    bits: int
    signed: bool
    packing: str
    block_rows: int
    block_columns: int
    zero: str = "none"
    bias: int = 0


@dataclass(frozen=True)
class Scheme:
    """How a stored weight is decoded: codes, then the low-rank part, around the rotation.

    low_rank "none": no such part; "inside": `W = unrotate(decode + up @ down)`; "outside":
    `W = unrotate(decode) + up @ down`.
    """

    name: str
    codes: Codebook | Grid
    rotation: Rotation | None = None
    low_rank: str = "none"

    @property
    def bits(self) -> int:
        """Bits per weight, without scales."""
        return 4 if isinstance(self.codes, Codebook) else self.codes.bits

    def to_json(self) -> str:
        """The scheme as text that `scheme_from_json` reads."""
        return json.dumps({"kind": type(self.codes).__name__, **asdict(self)})


def scheme_from_json(text: str) -> Scheme:
    """The scheme written by `Scheme.to_json`.

    Raises:
        ValueError: if it is not one.
    """
    try:
        content: dict[str, Any] = json.loads(text)
        kind = {"Codebook": Codebook, "Grid": Grid}[content.pop("kind")]
        rotation = content.pop("rotation")
        return Scheme(
            codes=kind(**content.pop("codes")),
            rotation=None if rotation is None else Rotation(**rotation),
            **content,
        )
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"not a stored-weight scheme: {error}") from error
