"""Mutated quantized files: an error of ours or a correct load, whatever is wrong with them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import CASES, write_case
from leandit.loaders.contents import contents, to_float
from leandit.loaders.errors import CheckpointError
from leandit.loaders.reader import open_checkpoint
from leandit.loaders.survey import survey
from torch.utils._python_dispatch import TorchDispatchMode

MUTATIONS = 50
"""Per format; with 49 formats about 2,500 files."""


def mutate(data: bytearray, rng: random.Random) -> bytes:
    """Change dtypes, shapes, names or config text in the header, keeping offsets; or flip bytes."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    entry = header[name]
    kind = rng.randrange(6)
    if kind == 0:
        entry["dtype"] = rng.choice(["I8", "U8", "F8_E4M3", "F8_E5M2", "BF16", "F32", "I32"])
    elif kind == 1:
        entry["shape"] = rng.choice(
            [entry["shape"][::-1], [1, *entry["shape"]], [int(torch.Size(entry["shape"]).numel())]]
        )
    elif kind == 2:
        header[rng.choice([f"{name}x", name.replace("weight", "wait"), name[:-1]])] = header.pop(
            name
        )
    elif kind == 3:
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        for _ in range(min(8, stop - start)):
            data[rng.randrange(start, stop)] = rng.randrange(256)
    elif kind == 4:
        del header[name]
    else:
        return bytes(data[: rng.randrange(len(data))])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data[8 + length :])


MAX_TENSOR_BYTES = 1_000_000
"""The files hold 16 KB in 8 bits; float64 of it is 130 KB."""


class MemoryLimit(TorchDispatchMode):
    """Fails where any operation makes a tensor that is out of proportion to the file."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, torch.Tensor):
                assert tensor.untyped_storage().nbytes() <= MAX_TENSOR_BYTES, func
        return made


def test_the_memory_limit_sees_a_large_tensor() -> None:
    with MemoryLimit(), pytest.raises(AssertionError):
        torch.zeros(2_000_000, dtype=torch.uint8)


@pytest.mark.parametrize("name", list(CASES))
def test_mutations_never_crash_the_loader_nor_fill_the_memory(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {f"blocks.{i}.q": torch.randn(32, 256, generator=generator) for i in range(2)}
    plain = {f"{layer}.bias": torch.ones(32) for layer in weights}
    path, _ = write_case(name, tmp_path, weights, plain)
    original = path.read_bytes()
    rng = random.Random(name)
    refused = 0
    for _ in range(MUTATIONS):
        path.write_bytes(mutate(bytearray(original), rng))
        try:
            found = survey(open_checkpoint(path), "none")
            found.require_loadable()
            for item in contents(found).layers:
                with MemoryLimit():
                    value = to_float(item.load(found.checkpoint))
                assert value.shape == item.shape
        except CheckpointError:
            refused += 1
    assert refused > MUTATIONS // 8
