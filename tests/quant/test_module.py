"""Quantizing a plain torch model without ComfyUI."""

from __future__ import annotations

import pytest
import torch
from leandit.quant.errors import WeightError
from leandit.quant.formats import FORMATS
from leandit.quant.module import QuantizedLinear, quantize_module
from leandit.quant.settings import settings_from
from leandit.quant.weight import quantize_weight


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(16, 64)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "bound"),
    [("int8_convrot", 0.03), ("int8", 0.03), ("w4a8_convrot", 0.12), ("w4a4_convrot", 0.3)],
)
@torch.no_grad()
def test_a_quantized_model_stays_close_to_its_source(
    name: str, bound: float, dtype: torch.dtype
) -> None:
    model = Model().to(dtype)
    x = torch.randn(4, 5, 16).to(dtype)
    expected = model(x)
    plan, weights, results = quantize_module(model, settings_from(name))
    assert (
        set(weights)
        == set(results)
        == {f"blocks.{i}.{p}" for i in range(3) for p in ("up", "down")}
    )
    assert [decision.layer.name for decision in plan.kept] == ["embed"]
    assert isinstance(model.blocks[0].up, QuantizedLinear)
    assert isinstance(model.embed, torch.nn.Linear)
    out = model(x)
    assert out.dtype == dtype
    assert ((out - expected).norm() / expected.norm()) < bound


def test_the_weights_are_those_of_quantize_weight() -> None:
    model = Model()
    source = model.blocks[1].up.weight.detach().clone()
    _, weights, _ = quantize_module(model, settings_from())
    expected = quantize_weight(source, FORMATS["int8_convrot"], 64)
    assert torch.equal(weights["blocks.1.up"].tensors[""], expected.tensors[""])


def test_a_broken_weight_leaves_the_model_unchanged() -> None:
    model = Model()
    model.blocks[2].down.weight.data[0, 0] = float("nan")
    with pytest.raises(WeightError, match=r"blocks\.2\.down"):
        quantize_module(model, settings_from())
    assert isinstance(model.blocks[0].up, torch.nn.Linear)
