"""Reading checkpoints, and refusing broken or hostile ones in words."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.loaders.errors import CheckpointError
from leandit.loaders.header import read_header
from leandit.loaders.reader import open_checkpoint
from safetensors.torch import save_file

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "a.bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "b.weight": torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4),
    "b.scale": torch.tensor(0.25),
    "empty": torch.empty(0, 5, dtype=torch.float16),
    "f8": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    save_file(TENSORS, path, {"made": "by hand"})
    return path


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_every_tensor_comes_back_as_it_was_written(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    assert set(checkpoint) == set(TENSORS)
    assert checkpoint.metadata == {"made": "by hand"}
    for name, tensor in TENSORS.items():
        found = checkpoint.read(name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


def test_a_read_tensor_is_memory_of_its_own(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    checkpoint.read("a.weight").zero_()
    assert torch.equal(checkpoint.read("a.weight"), TENSORS["a.weight"])


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", "not valid JSON"),
        (b"[1]", b"", "not a JSON object"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ is not a map of strings"),
        ({"x": [1]}, b"", "'x' has no dtype, shape and data_offsets"),
        ({"x": entry("F31")}, b"1234", "unknown dtype 'F31'"),
        ({"x": entry(["F32"])}, b"1234", "unknown dtype"),
        ({"x": entry(shape=[-1])}, b"1234", r"impossible shape \[-1\]"),
        ({"x": entry(shape=[True])}, b"1234", "impossible shape"),
        ({"x": entry(shape=[1.0])}, b"1234", "impossible shape"),
        ({"x": entry(offsets=[4, 0])}, b"1234", "impossible data_offsets"),
        ({"x": entry(offsets=[0])}, b"1234", "impossible data_offsets"),
        ({"x": entry(shape=[2**40, 2**40])}, b"1234", "hold 4"),
        ({"x": entry("F4", [1], [0, 1])}, b"1", "needs 0.5 bytes"),
        ({"x": entry(), "y": entry(offsets=[2, 6])}, b"123456", "'y' overlaps"),
        ({"x": entry(offsets=[4, 8])}, b"12345678", "4 bytes before tensor 'x' belong to none"),
        ({"x": entry()}, b"12", "is cut short: its tensors end at byte"),
        ({"x": entry()}, b"123456", "2 bytes after its last tensor"),
        (b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"x":{}}', b"", "names 'x' twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_broken_header_is_refused(header: Any, data: bytes, words: str, tmp_path: Path) -> None:
    path = write(tmp_path / "broken.safetensors", header, data)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is 0 bytes long"),
        (b"1234", "is 4 bytes long"),
        (struct.pack("<Q", 2**63) + b"{}", "claims a header of 9223372036854775808 bytes"),
        (struct.pack("<Q", 99_000_000) + b"{}", "ends inside its header"),
        (b"PK\x03\x04" * 8, "is a PyTorch file"),
    ],
    ids=["empty", "short", "huge header", "header cut off", "zip file"],
)
def test_a_file_that_is_none_is_refused_without_a_large_allocation(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_dtype_torch_does_not_hold_is_listed_but_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "f4.safetensors", {"x": entry("F4", [4], [0, 2])}, b"12")
    checkpoint = open_checkpoint(path)
    assert checkpoint.entries["x"].nbytes == 2
    with pytest.raises(CheckpointError, match="dtype F4, which torch does not hold"):
        checkpoint.read("x")


def test_a_file_cut_after_it_was_opened_is_noticed(good: Path) -> None:
    checkpoint = open_checkpoint(good)
    good.write_bytes(good.read_bytes()[:-40])
    last = max(checkpoint.entries.values(), key=lambda found: found.stop)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.read(last.name)


def shard(folder: Path, weight_map: Any, **files: dict[str, torch.Tensor]) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors", {name: "yes"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    index = shard(
        tmp_path,
        {"a": "one.safetensors", "b": "two.safetensors"},
        one={"a": torch.ones(2)},
        two={"b": torch.zeros(3)},
    )
    checkpoint = open_checkpoint(index)
    assert list(checkpoint) == ["a", "b"]
    assert torch.equal(checkpoint.read("b"), torch.zeros(3))
    assert checkpoint.metadata == {"one": "yes", "two": "yes"}


@pytest.mark.parametrize(
    "name",
    [
        "../one.safetensors",
        "/etc/passwd",
        "c:\\one.safetensors",
        "x/one.safetensors",
        "",
        5,
        "one.bin",
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(name: Any, tmp_path: Path) -> None:
    index = shard(tmp_path, {"a": name}, one={"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="no file beside it"):
        open_checkpoint(index)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "one.safetensors", "z": "one.safetensors"}, "says 'z' is in one.safetensors"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "'a' is in one.safetensors and in two"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
    ids=["missing tensor", "tensor twice", "empty", "no map"],
)
def test_an_index_that_contradicts_its_shards_is_refused(
    weight_map: Any, words: str, tmp_path: Path
) -> None:
    both = {"a": torch.ones(2), "c": torch.ones(1)}
    index = shard(tmp_path, weight_map, one={"a": torch.ones(2)}, two=both)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(index)


def test_a_missing_shard_is_an_operating_system_error_with_its_name(tmp_path: Path) -> None:
    index = shard(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(OSError, match=r"gone\.safetensors"):
        open_checkpoint(index)


def mutate(content: bytearray, source: random.Random) -> bytearray:
    """One to four random changes: flipped bytes, cut ends, repeated, swapped or inserted parts."""
    for _ in range(source.randint(1, 4)):
        where = source.randrange(len(content)) if content else 0
        kind = source.randrange(6)
        if kind == 0 and content:
            content[where] ^= 1 << source.randrange(8)
        elif kind == 1:
            del content[where:]
        elif kind == 2:
            content[where:where] = bytes(source.randrange(256) for _ in range(source.randint(1, 9)))
        elif kind == 3:
            del content[where : where + source.randint(1, 9)]
        elif kind == 4:
            content[where:where] = source.choice([b"-1", b"1e99", b"null", b'"', b"]", b"9" * 30])
        elif content:
            content[where] = source.choice(b'0123456789[]{}",:')
    return content


def test_3000_mutated_files_give_our_error_or_a_correct_load(good: Path, tmp_path: Path) -> None:
    source = random.Random(20)
    original = good.read_bytes()
    header_end = 8 + struct.unpack("<Q", original[:8])[0]
    path = tmp_path / "mutant.safetensors"
    refused = loaded = 0
    for number in range(3000):
        header, data = bytearray(original[:header_end]), bytearray(original[header_end:])
        if number % 3 == 0:
            content = mutate(header + data, source)
        elif number % 3 == 1:
            content = mutate(header, source) + data
        else:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            content = header + data
        path.write_bytes(content)
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            refused += 1
            assert str(path) in str(error)
            continue
        loaded += 1
        total = 0
        for name, found in checkpoint.entries.items():
            tensor = checkpoint.read(name)
            assert tuple(tensor.shape) == found.shape
            assert tensor.nbytes == found.nbytes
            total += found.nbytes
        assert total == path.stat().st_size - 8 - struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert refused > 1500
    assert loaded >= 1000


def test_the_header_keeps_the_order_of_the_data(good: Path) -> None:
    entries = read_header(good).entries
    assert [e.start for e in entries] == sorted(e.start for e in entries)
