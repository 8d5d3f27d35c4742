"""Quantizing a file into a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.demo import run as demo
from leandit.demo.flux import load_flux
from leandit.loaders.architecture import image_model_of, model_prefix
from leandit.loaders.convert import quantize_file
from leandit.loaders.errors import CheckpointError
from leandit.loaders.reader import open_checkpoint
from leandit.quant.errors import NothingSelectedError, WeightError
from leandit.quant.module import quantize_module
from leandit.quant.settings import settings_from
from safetensors.torch import load_file, save_file

FORMATS = ["int8_convrot", "int8", "w4a8_convrot", "w4a4_convrot"]


def model(dtype: torch.dtype = torch.bfloat16, prefix: str = "") -> dict[str, torch.Tensor]:
    """A model with three blocks, an embedder, a norm and an embedding table."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed_tokens.weight": torch.randn(30, 64, generator=generator),
        "x_embedder.weight": torch.randn(64, 32, generator=generator),
        "norm.weight": torch.ones(64),
    }
    for index in range(3):
        tensors[f"blocks.{index}.q.weight"] = torch.randn(48, 256, generator=generator)
        tensors[f"blocks.{index}.q.bias"] = torch.randn(48, generator=generator)
        tensors[f"blocks.{index}.odd.weight"] = torch.randn(16, 100, generator=generator)
    return {prefix + name: tensor.to(dtype) for name, tensor in tensors.items()}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_the_demo_file_gets_the_bits_of_the_model_in_memory(name: str, tmp_path: Path) -> None:
    settings = settings_from(name)
    done = quantize_file(demo.MODEL_FILE, tmp_path / "out.safetensors", settings)
    assert done.plan.family == "flux"
    _, weights, _ = quantize_module(load_flux(demo.MODEL_FILE, torch.bfloat16), settings, "flux")
    found, source = load_file(tmp_path / "out.safetensors"), load_file(demo.MODEL_FILE)
    assert {d.layer.name for d in done.plan.selected} == set(weights)
    for layer, weight in weights.items():
        for suffix, tensor in weight.tensors.items():
            assert equal(found.pop(f"{layer}.weight{suffix}"), tensor)
        found.pop(f"{layer}.comfy_quant")
        source.pop(f"{layer}.weight")
    assert set(found) == set(source)
    for key, tensor in source.items():
        assert equal(found[key], tensor)
    assert done.bytes_after < done.bytes_before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prefix", ["", "model.", "diffusion_model.", "model.diffusion_model."])
def test_a_prefix_is_kept_and_every_kept_layer_has_a_reason(
    dtype: torch.dtype, prefix: str, tmp_path: Path
) -> None:
    save_file(model(dtype, prefix), tmp_path / "in.safetensors", {"author": "me"})
    done = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    checkpoint = open_checkpoint(tmp_path / "out.safetensors")
    header = json.loads(checkpoint.metadata["_quantization_metadata"])
    assert set(header["layers"]) == {f"{prefix}blocks.{i}.q" for i in range(3)}
    assert checkpoint.metadata["author"] == "me"
    assert checkpoint.read(f"{prefix}blocks.1.q.weight").dtype == torch.int8
    assert equal(checkpoint.read(f"{prefix}norm.weight"), model(dtype)["norm.weight"])
    reasons = {d.layer.name: d.reason for d in done.plan.kept}
    assert reasons["embed_tokens"] == "an embedding table: its rows are looked up"
    assert reasons["blocks.0.odd"] == "no rotation group of 256, 64, 16 divides K=100"
    assert "outside the repeated blocks" in reasons["x_embedder"]


def test_shards_give_the_file_that_one_file_gives(tmp_path: Path) -> None:
    tensors = model()
    save_file(tensors, tmp_path / "in.safetensors")
    names = list(tensors)
    files = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    places = {name: file for file, part in files.items() for name in part}
    index.write_text(json.dumps({"weight_map": places}))
    quantize_file(tmp_path / "in.safetensors", tmp_path / "a.safetensors", settings_from())
    quantize_file(index, tmp_path / "b.safetensors", settings_from())
    whole, joined = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert set(whole) == set(joined)
    for key, tensor in whole.items():
        assert equal(tensor, joined[key])


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "in.safetensors")
    totals: list[int] = []
    seen: list[int] = []

    def start(total: int) -> Any:
        totals.append(total)
        return seen.append

    quantize_file(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from(), False, start
    )
    assert totals == [sum(tensor.nbytes for tensor in model().values())]
    assert sum(seen) == totals[0]


def test_a_quantized_file_is_not_quantized_again(tmp_path: Path) -> None:
    tensors = {key: value for key, value in model().items() if "blocks" in key and "odd" not in key}
    save_file(tensors, tmp_path / "in.safetensors")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "one.safetensors", settings_from())
    with pytest.raises(CheckpointError, match="is quantized already"):
        quantize_file(tmp_path / "one.safetensors", tmp_path / "two.safetensors", settings_from())
    assert not (tmp_path / "two.safetensors").exists()


def test_an_existing_target_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    target.write_text("precious")
    with pytest.raises(CheckpointError, match="exists already; choose another name"):
        quantize_file(tmp_path / "in.safetensors", target, settings_from())
    assert target.read_text() == "precious"
    quantize_file(tmp_path / "in.safetensors", target, settings_from(), overwrite=True)
    assert "blocks.0.q.comfy_quant" in load_file(target)


def test_the_source_is_never_overwritten(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="is the source itself"):
        quantize_file(
            tmp_path / "in.safetensors", tmp_path / "in.safetensors", settings_from(), True
        )
    assert equal(load_file(tmp_path / "in.safetensors")["norm.weight"], model()["norm.weight"])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"blocks.2.q.weight": torch.full((48, 256), float("nan"))}, WeightError),
        ({f"blocks.{i}.q.weight": torch.ones(48, 100) for i in range(3)}, NothingSelectedError),
    ],
    ids=["nan in a weight", "nothing selected"],
)
def test_what_cannot_be_quantized_leaves_no_file(
    change: dict[str, torch.Tensor], error: type[Exception], tmp_path: Path
) -> None:
    save_file(model(torch.float32) | change, tmp_path / "in.safetensors")
    with pytest.raises(error):
        quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_prefixes_and_unknown_architectures() -> None:
    assert model_prefix(["model.diffusion_model.a.weight", "model.b", "vae.c.weight"]) == (
        "model.diffusion_model."
    )
    assert model_prefix(["a.weight"]) == ""
    assert image_model_of(["a.weight"]) is None


def test_a_header_that_labels_kept_layers_goes_on_naming_them(tmp_path: Path) -> None:
    """A second header replaces the first; without this, kept int8 layers would load as noise."""
    tensors = model()
    codes = torch.randint(-90, 90, (48, 256), dtype=torch.int8)
    tensors["blocks.0.q.weight"] = codes
    tensors["blocks.0.q.weight_scale"] = torch.ones(48, 1)
    header = {"layers": {"blocks.0.q": {"format": "int8_tensorwise"}}}
    metadata = {"_quantization_metadata": json.dumps(header)}
    save_file(tensors, tmp_path / "in.safetensors", metadata)
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    checkpoint = open_checkpoint(tmp_path / "out.safetensors")
    listed = json.loads(checkpoint.metadata["_quantization_metadata"])["layers"]
    assert listed["blocks.0.q"] == {"format": "int8_tensorwise"}
    assert {"blocks.1.q", "blocks.2.q"} < set(listed)
    assert equal(checkpoint.read("blocks.0.q.weight"), codes)


def test_a_t5_position_table_is_not_taken_for_a_linear(tmp_path: Path) -> None:
    tensors = model()
    name = "blocks.0.SelfAttention.relative_attention_bias.weight"
    tensors[name] = torch.ones(32, 64).bfloat16()
    save_file(tensors, tmp_path / "in.safetensors")
    settings = settings_from(preset="none")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings)
    assert load_file(tmp_path / "out.safetensors")[name].dtype == torch.bfloat16


def test_a_file_that_reads_back_differently_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.loaders import stream

    save_file(model(), tmp_path / "in.safetensors")
    numbers = iter(range(10_000))
    monkeypatch.setattr(stream, "digest", lambda tensor: next(numbers))
    with pytest.raises(CheckpointError, match="read back differs from what was written"):
        quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    assert [file.name for file in tmp_path.iterdir()] == ["in.safetensors"]
