"""Whether torch's integer matrix product is exact on this processor.

oneDNN adds pairs of products in 16 bits where a processor has no VNNI, and they saturate: numbers
come out wrong by a few percent, without an error.
"""

from __future__ import annotations

from functools import cache

import torch

ROWS, DEPTH, COLUMNS = 32, 512, 48


@cache
def why_inexact_on_cpu() -> str | None:
    """Why `torch._int_mm` cannot be used on the CPU, or None if it is exact; tried once."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(100, 128, (ROWS, DEPTH), generator=generator, dtype=torch.int8)
    right = torch.randint(100, 128, (COLUMNS, DEPTH), generator=generator, dtype=torch.int8)
    try:
        found = torch._int_mm(left, right.t())
    except RuntimeError as error:
        return f"torch has no integer product on this processor ({error})"
    exact = (left.double() @ right.double().t()).to(torch.int32)
    if torch.equal(found, exact):
        return None
    return "torch's integer product is inexact on this processor, which has no VNNI"
