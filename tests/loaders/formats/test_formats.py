"""Every format in the wild: recognised, read as stored, and equal to a float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import CASES, write_case
from leandit.loaders.reader import open_checkpoint
from leandit.loaders.survey import Survey, survey
from leandit.quant.native import dequantize, to_quantized_tensor
from leandit.quant.stored.layout import stored_tensor
from leandit.quant.stored.requantize import requantize
from leandit.quant.stored.weight import StoredWeight, decode

SHAPES = {"blocks.0.square": (256, 256), "blocks.0.wide": (96, 512), "blocks.1.tall": (384, 256)}


@pytest.fixture(autouse=True)
def in_inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def weights() -> dict[str, torch.Tensor]:
    """Gaussian weights, every 37th column three times as large."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in SHAPES.items():
        made[name] = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        made[name][:, ::37] *= 3
    return made


def plain() -> dict[str, torch.Tensor]:
    made = {f"{name}.bias": torch.ones(shape[0]).bfloat16() for name, shape in SHAPES.items()}
    return made | {"norm.weight": torch.ones(256), "blocks.0.norm.scale": torch.ones(16)}


def opened(name: str, folder: Path) -> tuple[Survey, dict[str, torch.Tensor]]:
    path, references = write_case(name, folder, weights(), plain())
    return survey(open_checkpoint(path), CASES[name].legacy_rotation), references


def value(weight: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return decode(weight, dtype) if isinstance(weight, StoredWeight) else dequantize(weight, dtype)


def tensor(weight: Any) -> Any:
    if isinstance(weight, StoredWeight):
        return stored_tensor(weight, torch.float32)
    return to_quantized_tensor(weight, torch.float32)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("name", list(CASES))
def test_dequantizes_to_the_reference(name: str, tmp_path: Path) -> None:
    found, references = opened(name, tmp_path)
    assert not found.faults
    assert {layer.name: layer.shape for layer in found.layers} == SHAPES
    assert set(found.plain) == set(plain())
    for layer in found.layers:
        weight = layer.load(found.checkpoint)
        reference = references[layer.name]
        assert (value(weight).double() - reference).abs().max() <= 1e-6 * reference.abs().max()
        assert distance(reference, weights()[layer.name]) < CASES[name].error


@pytest.mark.parametrize("name", [name for name in CASES if "int8" in CASES[name].loads_as])
def test_an_int8_file_becomes_the_native_layout_bit_for_bit(name: str, tmp_path: Path) -> None:
    found, references = opened(name, tmp_path)
    for layer in found.layers:
        weight = layer.load(found.checkpoint)
        assert CASES[name].loads_as == layer.loads_as
        assert tensor(weight)._layout_cls == weight.format.layout
        if weight.format.native_format != "int8_tensorwise":
            continue
        scale = weight.tensors["_scale"]
        assert (scale.dtype, scale.shape) == (torch.float32, (weight.shape[0], 1))
        if weight.group_size is None:  # one product, so its float32 is the reference's
            assert torch.equal(value(weight), references[layer.name].float())


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].loads_as == "stored"])
def test_a_foreign_format_keeps_its_bytes(name: str, tmp_path: Path) -> None:
    found, _ = opened(name, tmp_path)
    for layer in found.layers:
        weight = layer.load(found.checkpoint)
        assert isinstance(weight, StoredWeight)
        assert layer.loads_as.startswith("stored (")
        n, k = weight.shape
        assert weight.tensors["payload"].nbytes == n * k * weight.scheme.bits // 8
        scales = sum(t.nbytes for part, t in weight.tensors.items() if part not in ("up", "down"))
        assert scales < (0.75 if weight.scheme.bits == 4 else 1.2) * n * k


@pytest.mark.parametrize("name", list(CASES))
def test_a_linear_on_it_is_the_reference_s(name: str, tmp_path: Path) -> None:
    found, references = opened(name, tmp_path)
    for layer in found.layers:
        weight = layer.load(found.checkpoint)
        x = torch.randn(5, layer.shape[1], generator=torch.Generator().manual_seed(1))
        y = torch.nn.functional.linear(x, tensor(weight))
        expected = x.double() @ references[layer.name].T
        # comfy-kitchen's CPU code quantizes activations to 4 bits whatever linear_dtype says.
        bound = (
            0.25
            if layer.loads_as == "convrot_w4a4"
            else 1e-6
            if isinstance(weight, StoredWeight)
            else 0.02
        )
        assert distance(y, expected) < bound


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].loads_as == "stored"])
def test_a_stored_weight_takes_a_change_back_into_its_scheme(name: str, tmp_path: Path) -> None:
    """What a merged LoRA needs: same tensors' shapes and dtypes, and the format's error."""
    found, _ = opened(name, tmp_path)
    for layer in found.layers:
        weight = layer.load(found.checkpoint)
        assert isinstance(weight, StoredWeight)
        same = requantize(decode(weight), weight)
        assert distance(decode(same), decode(weight)) < CASES[name].error * 0.6
        generator = torch.Generator().manual_seed(2)
        changed = decode(weight) + 0.3 * torch.randn(weight.shape, generator=generator) / 16
        for seed in (0, 7):
            made = requantize(changed, weight, seed)
            assert distance(decode(made), changed) < CASES[name].error * (1 + (seed > 0))
            for part, old in weight.tensors.items():
                assert made.tensors[part].shape == old.shape, part
                assert made.tensors[part].dtype == old.dtype, part


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "SDNQ uint4", "int8_blockwise"])
def test_stochastic_rounding_keeps_what_is_smaller_than_a_step(name: str, tmp_path: Path) -> None:
    found, _ = opened(name, tmp_path)
    weight = found.layers[0].load(found.checkpoint)
    assert isinstance(weight, StoredWeight)
    changed = decode(weight) * 1.01
    mean = sum(decode(requantize(changed, weight, seed)) for seed in range(1, 65)) / 64
    nearest = decode(requantize(changed, weight))
    assert distance(mean, changed) < 0.5 * max(distance(nearest, changed), 0.02)


def test_the_activations_a_file_asks_for_are_kept(tmp_path: Path) -> None:
    found, _ = opened("convrot_w4a4 for int8 activations", tmp_path)
    weight = found.layers[0].load(found.checkpoint)
    assert tensor(weight)._params.linear_dtype == "int8"
