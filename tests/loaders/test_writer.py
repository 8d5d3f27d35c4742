"""Writing native files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from leandit.loaders import stream, writer
from leandit.quant.formats import FORMATS
from leandit.quant.weight import quantize_weight
from safetensors import safe_open
from safetensors.torch import load_file

CASES = {
    "int8_convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
    "int8": {"format": "int8_tensorwise"},
    "w4a8_convrot": {"format": "asym_w4a8_int8", "group_size": 16, "convrot_groupsize": 64},
    "w4a4_convrot": {"format": "convrot_w4a4", "convrot_groupsize": 64},
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_file_holds_every_tensor_and_both_markers(name: str, tmp_path: Path) -> None:
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    quantized = quantize_weight(weight, FORMATS[name], 64 if FORMATS[name].rotated else None)
    bias = torch.arange(8.0)
    path = tmp_path / "model.safetensors"
    writer.write_native(path, {"a.bias": bias}, {"a": quantized}, {"made_by": "test"})
    tensors = load_file(path)
    assert torch.equal(tensors.pop("a.bias"), bias)
    assert json.loads(tensors.pop("a.comfy_quant").numpy().tobytes()) == CASES[name]
    assert set(tensors) == {f"a.weight{suffix}" for suffix in quantized.tensors}
    for suffix, tensor in quantized.tensors.items():
        stored = tensors[f"a.weight{suffix}"]
        assert torch.equal(stored.view(torch.uint8), tensor.view(torch.uint8))
    with safe_open(path, "pt") as file:
        header = file.metadata()
    assert header["made_by"] == "test"
    layers = json.loads(header["_quantization_metadata"])["layers"]
    assert layers == {"a": CASES[name]}


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("old")

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(stream.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        writer.write_native(path, {"a": torch.ones(3)}, {}, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert path.read_text() == "old"
