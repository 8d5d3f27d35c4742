"""Writing a file tensor by tensor, whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from leandit.loaders import stream
from leandit.loaders.errors import CheckpointError
from leandit.loaders.header import read_header
from leandit.loaders.stream import TensorSpec, spec_of, write_stream
from safetensors.torch import load_file

TENSORS = {
    "u8": torch.arange(7, dtype=torch.uint8),
    "f32": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "f8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
}


def specs() -> list[TensorSpec]:
    return [spec_of(name, tensor) for name, tensor in TENSORS.items()]


def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_stream(path, specs(), {"key": "value"}, reversed(TENSORS.items()))
    found = load_file(path)
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())
    assert read_header(path).metadata == {"key": "value"}


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_stream(path, specs(), {}, TENSORS.items())
    for entry in read_header(path).entries:
        width = TENSORS[entry.name].element_size()
        assert entry.start % width == 0, entry


def test_the_file_has_ordinary_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_stream(path, specs(), {}, TENSORS.items())
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(os.stat(tmp_path / "plain").st_mode)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": torch.ones(2)}, "'b' was never written"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "is not the"),
        ({"a": torch.ones(2), "b": torch.ones(2).half()}, "is not the"),
        ({"a": torch.ones(2), "c": torch.ones(2)}, "is not the None in the header"),
    ],
    ids=["missing", "other shape", "other dtype", "unknown name"],
)
def test_tensors_that_are_not_those_promised_leave_no_file(
    given: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    promised = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,))]
    with pytest.raises(CheckpointError, match=words):
        write_stream(tmp_path / "x.safetensors", promised, {}, given.items())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield "u8", TENSORS["u8"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_stream(tmp_path / "x.safetensors", specs(), {}, interrupted())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_full_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = stream.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(stream.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(CheckpointError, match=r"needs 0\.00 GB, the disk has 0\.00 GB free"):
        write_stream(tmp_path / "x.safetensors", specs(), {}, TENSORS.items())
    assert list(tmp_path.iterdir()) == []
