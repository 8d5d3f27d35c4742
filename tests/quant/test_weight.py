"""Quantizing one weight: bit for bit comfy-kitchen's eager arithmetic on the float32 value."""

from __future__ import annotations

import math

import pytest
import torch
from leandit.kernels.hadamard import rotate
from leandit.quant.error import sqnr_db
from leandit.quant.errors import QuantError, WeightError
from leandit.quant.formats import FORMATS
from leandit.quant.measured import quantize_and_measure
from leandit.quant.native import dequantize, to_quantized_tensor
from leandit.quant.weight import quantize_weight

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = [
    pytest.param(name, group, id=f"{name} at group {group}" if group else name)
    for name, spec in FORMATS.items()
    for group in ((16, 64, 256) if spec.rotated else (None,))
]


def awkward_weight(dtype: torch.dtype, n: int = 40, k: int = 512) -> torch.Tensor:
    """Rows of zeros, one huge outlier, tiny values, outlier columns, equal +- maxima."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[0] = 0
    weight[1, 100] = 3000.0
    weight[2] *= 1e-4
    weight[:, 37] *= 50
    weight[3, 0], weight[3, 1] = -1.0, 1.0
    weight[4] = -0.25
    return weight.to(dtype)


def kitchen_tensors(weight: torch.Tensor, name: str, group: int | None) -> dict[str, torch.Tensor]:
    """What comfy-kitchen's eager quantizers make of a float32 weight."""
    from comfy_kitchen.backends.eager import convrot_w4a4, quantization, w4a8_int8

    if name == "int8":
        payload, scale = quantization.quantize_int8_rowwise(weight)
        return {"": payload, "_scale": scale}
    assert group is not None
    if name == "int8_convrot":
        payload, scale = quantization.quantize_int8_convrot_weight(weight, group)
        return {"": payload, "_scale": scale}
    if name == "w4a4_convrot":
        payload, scale = convrot_w4a4.quantize_convrot_w4a4_weight(weight, group)
        return {"": payload, "_scale": scale}
    payload, s_rel, s_channel, correction, codebook = w4a8_int8.quantize_w4a8_int8_weight(
        weight, convrot_groupsize=group
    )
    assert correction is None
    return {"": payload, "_s_rel": s_rel, "_s_channel": s_channel, "_codebook": codebook}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "group"), CASES)
def test_the_bits_are_those_of_comfy_kitchen(
    name: str, group: int | None, dtype: torch.dtype
) -> None:
    weight = awkward_weight(dtype)
    quantized = quantize_weight(weight, FORMATS[name], group)
    expected = kitchen_tensors(weight.float(), name, group)
    assert set(quantized.tensors) == set(expected)
    for suffix, tensor in expected.items():
        found = quantized.tensors[suffix]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), suffix


@pytest.mark.parametrize(("n", "k"), [(1, 256), (5, 2688), (3, 5376), (768, 3072)], ids=str)
def test_the_bits_are_those_of_comfy_kitchen_for_real_widths(n: int, k: int) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(k)).bfloat16()
    group = 64 if k % 256 else 256
    quantized = quantize_weight(weight, FORMATS["int8_convrot"], group)
    expected = kitchen_tensors(weight.float(), "int8_convrot", group)
    assert torch.equal(quantized.tensors[""], expected[""])
    assert torch.equal(quantized.tensors["_scale"], expected["_scale"])


def test_float32_arithmetic_uses_codes_up_to_127_and_never_more() -> None:
    payload = quantize_weight(awkward_weight(torch.bfloat16), FORMATS["int8_convrot"], 16)
    assert payload.tensors[""].min() == -127
    assert payload.tensors[""].max() == 127


@pytest.mark.parametrize(("name", "group"), CASES)
def test_a_gaussian_weight_keeps_the_ratio_its_format_promises(
    name: str, group: int | None
) -> None:
    weight = torch.randn(256, 5120, generator=torch.Generator().manual_seed(5)).bfloat16()
    if group and 5120 % group:
        pytest.skip("the group does not divide K")
    ratio = sqnr_db(weight, quantize_weight(weight, FORMATS[name], group))
    assert FORMATS[name].sqnr_floor_db <= ratio < FORMATS[name].sqnr_floor_db + 6


def test_rotation_saves_a_weight_with_outlier_columns() -> None:
    weight = torch.randn(128, 1024, generator=torch.Generator().manual_seed(2)) * 0.02
    weight[:, ::97] *= 40
    plain = sqnr_db(weight, quantize_weight(weight, FORMATS["int8"], None))
    ratios = [
        sqnr_db(weight, quantize_weight(weight, FORMATS["int8_convrot"], g)) for g in (16, 64, 256)
    ]
    assert ratios == sorted(ratios)
    assert ratios[0] > plain + 4
    assert ratios[2] > plain + 8


@pytest.mark.parametrize(("name", "group"), CASES)
def test_the_ratio_is_that_of_a_naive_float64_computation(name: str, group: int | None) -> None:
    weight = awkward_weight(torch.float32)[5:]
    quantized = quantize_weight(weight, FORMATS[name], group)
    error = weight.double() - dequantize(quantized).double()
    expected = 10 * math.log10((weight.double() ** 2).sum() / (error**2).sum())
    assert sqnr_db(weight, quantized) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("name", "group"), CASES)
def test_measuring_while_quantizing_gives_the_same_bits_and_ratio(
    name: str, group: int | None
) -> None:
    weight = awkward_weight(torch.float32, n=700)[5:]
    quantized, ratio = quantize_and_measure(weight, FORMATS[name], group, "layer")
    alone = quantize_weight(weight, FORMATS[name], group)
    for suffix, tensor in alone.tensors.items():
        assert torch.equal(quantized.tensors[suffix].view(torch.uint8), tensor.view(torch.uint8))
    assert ratio == pytest.approx(sqnr_db(weight, alone), abs=1e-3)
    with pytest.raises(WeightError, match="'layer' holds"):
        quantize_and_measure(weight * float("inf"), FORMATS[name], group, "layer")


def test_dequantizing_undoes_the_rotation() -> None:
    weight = awkward_weight(torch.float32)
    quantized = quantize_weight(weight, FORMATS["int8_convrot"], 64)
    stored = quantized.tensors[""].double() * quantized.tensors["_scale"].double()
    assert torch.allclose(dequantize(quantized).double(), rotate(stored, 64), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("name", "group"), CASES)
def test_a_native_tensor_shares_the_bytes_and_keeps_every_parameter(
    name: str, group: int | None
) -> None:
    quantized = quantize_weight(awkward_weight(torch.bfloat16), FORMATS[name], group)
    tensor = to_quantized_tensor(quantized, torch.bfloat16)
    assert tensor._qdata.data_ptr() == quantized.tensors[""].data_ptr()
    assert tensor.dtype == torch.bfloat16
    assert tuple(tensor.shape) == quantized.shape
    stored = tensor.state_dict("weight")
    assert {key.removeprefix("weight"): value.shape for key, value in stored.items()} == {
        key: value.shape for key, value in quantized.tensors.items()
    }
    if group:
        assert tensor._params.convrot_groupsize == group


def test_a_row_slice_dequantizes_to_the_rows() -> None:
    weight = awkward_weight(torch.float32, n=16)
    for name, group in (("w4a8_convrot", 256), ("int8_convrot", 64), ("w4a4_convrot", 16)):
        quantized = quantize_weight(weight, FORMATS[name], group)
        part = dequantize(quantized.rows(slice(3, 9)))
        assert torch.allclose(part, dequantize(quantized)[3:9], atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_value_that_is_not_finite_is_named_with_its_layer_and_place(value: float) -> None:
    weight = awkward_weight(torch.bfloat16)
    weight[7, 11] = value
    with pytest.raises(WeightError, match=r"'blocks\.3\.q' .*row 7, column 11") as caught:
        quantize_weight(weight, FORMATS["int8_convrot"], 64, "blocks.3.q")
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(("name", "group"), [("int8", 64), ("int8_convrot", None)])
def test_a_format_and_group_that_contradict_are_an_error(name: str, group: int | None) -> None:
    with pytest.raises(QuantError, match=name):
        quantize_weight(torch.zeros(2, 64), FORMATS[name], group)
    with pytest.raises(QuantError, match=name):
        quantize_and_measure(torch.zeros(2, 64), FORMATS[name], group, "layer")
