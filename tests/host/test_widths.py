"""Every Linear of a model stands in the report with its group or its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("inference")

WIDTHS = {8: None, 20: None, 32: 16, 96: 16, 100: None, 2688: 64, 5376: 256}


class Block(torch.nn.Module):
    """One Linear of each width, each fed from 16 features."""

    def __init__(self) -> None:
        import comfy.ops

        super().__init__()
        linear = comfy.ops.manual_cast.Linear
        self.up = torch.nn.ModuleDict({f"k{k}": torch.nn.Linear(16, k) for k in WIDTHS})
        self.down = torch.nn.ModuleDict({f"k{k}": linear(k, 16) for k in WIDTHS})
        for layer in self.down.values():
            torch.nn.init.normal_(layer.weight, std=0.02)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for key, up in self.up.items():
            x = x + self.down[key](up(x))
        return x


class Widths(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("format", "bound"),
    [("int8_convrot", 0.03), ("int8", 0.03), ("w4a8_convrot", 0.15), ("w4a4_convrot", 0.4)],
)
def test_every_width_is_reported_and_the_output_is_finite(
    tiny: Any, comfyui: Any, format: str, bound: float
) -> None:
    from leandit.host.quantize import quantize_model
    from leandit.quant.settings import settings_from

    source = tiny.build("wan")
    torch.manual_seed(0)
    source.model.diffusion_model = Widths().requires_grad_(False)
    quantized, report = quantize_model(source, settings_from(format))
    layers = {layer["name"]: layer for layer in report.layers}
    assert len(layers) == 4 * len(WIDTHS)
    for k, group in WIDTHS.items():
        layer = layers[f"blocks.1.down.k{k}"]
        if format == "int8":
            assert (layer["format"], layer["group_size"]) == ("int8", None)
        elif group is None:
            assert layer["format"] is None
            assert layer["reason"] == f"no rotation group of 256, 64, 16 divides K={k}"
        elif format == "w4a4_convrot" and k % 64:
            assert layer["reason"] == f"w4a4_convrot needs K divisible by 64, K={k}"
        else:
            assert (layer["format"], layer["group_size"]) == (format, group)
    x = torch.randn(5, 16)
    out = quantized.model.diffusion_model(x)
    assert out.isfinite().all()
    assert ((out - source.model.diffusion_model(x)).norm() / out.norm()) < bound
