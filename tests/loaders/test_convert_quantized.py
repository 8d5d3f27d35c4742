"""Quantizing files that are quantized already, or have diffusers' names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from format_builders import bnb
from format_cases import CASES, write_case
from leandit.loaders.contents import contents, to_float
from leandit.loaders.convert import quantize_file
from leandit.loaders.inspect import inspect_file
from leandit.loaders.reader import open_checkpoint
from leandit.loaders.survey import survey
from leandit.quant.formats import FORMATS
from leandit.quant.settings import settings_from
from leandit.quant.weight import quantize_weight
from safetensors.torch import load_file, save_file

UNLABELLED = {"LightX2V": "none", "INT8-Fast of April, Sylvester 128": "sylvester_128"}
LAYERS = [f"blocks.{block}.{layer}" for block in range(2) for layer in ("q", "up")]


@pytest.fixture(autouse=True)
def in_inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(512 if name.endswith("up") else 256, 256, generator=generator) / 16
        for name in LAYERS
    }


def plain() -> dict[str, torch.Tensor]:
    return {f"{name}.bias": torch.zeros(w.shape[0]).bfloat16() for name, w in weights().items()}


def expected(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    made = quantize_weight(weight.float(), FORMATS["int8_convrot"], 256)
    return {f"weight{suffix}": tensor for suffix, tensor in made.tensors.items()}


def fp8(style: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A file's tensors and the weights they stand for, in float32."""
    tensors, exact = dict(plain()), {}
    for name, weight in weights().items():
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        exact[name] = codes.float() * scale
        tensors[f"{name}.weight"] = codes
        tensors[f"{name}.{'scale_weight' if style == 'old' else 'weight_scale'}"] = scale
        if style == "comfy_quant":
            text = json.dumps({"format": "float8_e4m3fn"}).encode()
            tensors[f"{name}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    if style == "old":
        tensors["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    return tensors, exact


@pytest.mark.parametrize("style", ["comfy_quant", "old", "unlabelled"])
def test_scaled_fp8_is_decoded_and_what_is_kept_stays_fp8(style: str, tmp_path: Path) -> None:
    tensors, exact = fp8(style)
    save_file(tensors, tmp_path / "in.safetensors")
    done = quantize_file(
        tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from(exclude="*.1.up")
    )
    assert [d.layer.name for d in done.plan.kept] == ["blocks.1.up"]
    assert any("quantized before (float8_e4m3fn" in note for note in done.plan.notes)
    found = load_file(tmp_path / "out.safetensors")
    for name in LAYERS[:3]:
        for part, tensor in expected(exact[name]).items():
            assert torch.equal(found[f"{name}.{part}"], tensor)
    codes, kept = tensors["blocks.1.up.weight"], found["blocks.1.up.weight"]
    assert torch.equal(kept.view(torch.uint8), codes.view(torch.uint8))
    assert not {key for key in found if "scaled_fp8" in key or "scale_weight" in key}
    report = inspect_file(tmp_path / "out.safetensors", "auto", None)
    assert report["formats"] == {"int8_tensorwise": 3, "float8_e4m3fn": 1}
    assert not report["faults"]
    label = bytes(found["blocks.1.up.comfy_quant"].tolist())
    assert json.loads(label) == {"format": "float8_e4m3fn"}
    header = open_checkpoint(tmp_path / "out.safetensors").metadata["_quantization_metadata"]
    assert set(json.loads(header)["layers"]) == set(LAYERS)


def test_fp8_without_scale_is_taken_as_the_numbers_it_holds(tmp_path: Path) -> None:
    tensors = {f"{n}.weight": w.to(torch.float8_e5m2) for n, w in weights().items()}
    save_file({**tensors, **plain()}, tmp_path / "in.safetensors")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    found = load_file(tmp_path / "out.safetensors")
    for name in LAYERS:
        for part, tensor in expected(tensors[f"{name}.weight"]).items():
            assert torch.equal(found[f"{name}.{part}"], tensor)


@pytest.mark.parametrize("name", list(CASES))
def test_every_foreign_format_becomes_native_or_stays_native(name: str, tmp_path: Path) -> None:
    """Two new 16-bit layers are quantized; the format's layers are requantized or kept."""
    case = CASES[name]
    new = {f"blocks.{i}.new.weight": torch.ones(64, 256).bfloat16() * i for i in range(2)}
    path, references = write_case(name, tmp_path, weights(), plain() | new)
    out = tmp_path / "out.safetensors"
    rotation = UNLABELLED.get(name, "auto")
    settings = settings_from(exclude="*.1.up")
    done = quantize_file(path, out, settings, legacy_rotation=rotation)
    found = survey(open_checkpoint(out), "none")
    assert not found.faults and not found.ignored
    assert all(layer.stock == "loads it" for layer in found.layers)
    loaded = {i.name: to_float(i.load(found.checkpoint)) for i in contents(found).layers}
    selected = {d.layer.name for d in done.plan.selected}
    foreign = case.loads_as == "stored" or name == "asym_w4a8_int8 with correction"
    anew = set(LAYERS) - {"blocks.1.up"} if foreign else set()
    assert selected == {"blocks.0.new", "blocks.1.new"} | anew
    for layer, reference in references.items():
        if layer in anew:
            added = (loaded[layer] - reference).norm() / reference.norm()
            assert 0.001 < added < 0.02
        elif foreign:
            kept = found.checkpoint.read(f"{layer}.weight")
            assert kept.dtype == torch.bfloat16
            assert torch.allclose(kept.double(), reference, rtol=2**-8, atol=1e-7)
        else:
            assert (loaded[layer] - reference).abs().max() <= 1e-6 * reference.abs().max()


def test_labels_of_a_text_encoder_in_the_header_are_kept(tmp_path: Path) -> None:
    """A second header replaces the first; an all-in-one checkpoint's other parts stay labelled."""
    tensors = {f"model.diffusion_model.{n}.weight": w for n, w in weights().items()}
    tensors["text_encoder.q.weight"] = torch.ones(16, 16, dtype=torch.int8)
    tensors["text_encoder.q.weight_scale"] = torch.ones(16, 1)
    header = {"layers": {"text_encoder.q": {"format": "int8_tensorwise"}}}
    save_file(tensors, tmp_path / "in.safetensors", {"_quantization_metadata": json.dumps(header)})
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    found = open_checkpoint(tmp_path / "out.safetensors")
    listed = json.loads(found.metadata["_quantization_metadata"])["layers"]
    assert listed["text_encoder.q"] == {"format": "int8_tensorwise"}
    assert len(listed) == 1 + len(LAYERS)
    assert torch.equal(found.read("text_encoder.q.weight"), tensors["text_encoder.q.weight"])


@pytest.mark.parametrize("quantized", [False, True], ids=["16 bit", "nf4"])
def test_diffusers_names_become_comfyuis(quantized: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {
        f"transformer_blocks.{block}.attn.to_{part}": torch.randn(64, 256, generator=generator)
        for block in range(2)
        for part in "qkv"
    }
    tensors = {
        "x_embedder.weight": torch.ones(64, 4),
        "norm_out.linear.weight": torch.ones(8, 4),
        "time_text_embed.text_embedder.linear_1.weight": torch.ones(64, 4),
    }
    exact = {}
    for layer, weight in parts.items():
        made = {"weight": weight.bfloat16()}
        exact[layer] = weight.bfloat16().double()
        if quantized:
            made, exact[layer] = bnb("nf4", False)(weight.double())
        tensors |= {f"{layer}.{part}": value.clone() for part, value in made.items()}
    save_file(tensors, tmp_path / "in.safetensors")
    done = quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    assert "names translated from diffusers' (flux)" in done.plan.notes
    found = load_file(tmp_path / "out.safetensors")
    assert "img_in.weight" in found and not any("transformer_blocks" in name for name in found)
    for block in range(2):
        stacked = torch.cat([exact[f"transformer_blocks.{block}.attn.to_{p}"] for p in "qkv"])
        for part, tensor in expected(stacked).items():
            assert torch.equal(found[f"double_blocks.{block}.img_attn.qkv.{part}"], tensor)
