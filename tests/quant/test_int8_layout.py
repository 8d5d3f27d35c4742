"""The dispatched int8 layout: the same bytes, run by our kernels, under every way torch calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from leandit.kernels.dispatch import LinearSettings
from leandit.kernels.int8 import int8_linear
from leandit.kernels.linear_op import from_text, to_text
from leandit.kernels.row_split import RowSplit
from leandit.quant.formats import FORMATS
from leandit.quant.int8_layout import LAYOUT_NAME, int8_tensor, plain_int8_tensor
from leandit.quant.native import from_quantized_tensor, to_quantized_tensor
from leandit.quant.weight import quantize_weight

N, K = 96, 256
SETTINGS = LinearSettings(RowSplit("fixed", 16, 1))


def base(scale_shape: str = "[N,1]") -> Any:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    held: Any = to_quantized_tensor(
        quantize_weight(weight, FORMATS["int8_convrot"], 64), torch.bfloat16
    )
    if scale_shape == "[]":
        import dataclasses

        params = dataclasses.replace(held._params, scale=torch.tensor(0.02))
        held = type(held)(held._qdata, held._layout_cls, params)
    return held


def linear(weight: Any, bias: bool = True) -> torch.nn.Linear:
    module = torch.nn.Linear(K, N, bias=bias, dtype=torch.bfloat16)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module.requires_grad_(False)


def inputs(m: int = 50) -> torch.Tensor:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_the_bytes_are_shared_and_come_back() -> None:
    held = base()
    ours: Any = int8_tensor(held, SETTINGS)
    assert ours._qdata.data_ptr() == held._qdata.data_ptr()
    assert ours._params.scale.data_ptr() == held._params.scale.data_ptr()
    assert from_text(ours._params.settings) == SETTINGS
    assert torch.equal(ours.dequantize(), held.dequantize())
    again: Any = plain_int8_tensor(ours)
    assert again._layout_cls == held._layout_cls and again._params == held._params
    weight = from_quantized_tensor(ours)
    assert weight is not None and weight.group_size == 64
    twice: Any = int8_tensor(ours, LinearSettings())
    assert from_text(twice._params.settings) == LinearSettings()


def test_settings_survive_as_text() -> None:
    for settings in (SETTINGS, LinearSettings(backend="cpu", verbose=True)):
        assert from_text(to_text(settings)) == settings


@pytest.mark.parametrize("mode", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("scale", ["[N,1]", "[]"])
def test_a_linear_runs_through_the_dispatcher_however_torch_spells_it(
    mode: str, bias: bool, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.kernels.dispatch import Dispatcher

    calls: list[int] = []
    run = Dispatcher.linear

    def counted(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(x.shape[0])
        return run(self, x, *rest)

    monkeypatch.setattr(Dispatcher, "linear", counted)
    held = base(scale)
    module = linear(int8_tensor(held, SETTINGS), bias)
    context = {
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
        "grad": torch.enable_grad,
    }[mode]
    x = inputs()
    with context():
        out = module(x)
    column = held._params.scale.reshape(-1, 1).expand(N, 1)
    expected = int8_linear(x, held._qdata, column, module.bias, 64)
    assert calls == [50]
    assert (out.float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_merging_a_change_keeps_layout_and_settings() -> None:
    """As ComfyUI does with a LoRA."""
    ours: Any = int8_tensor(base(), SETTINGS)
    changed = ours.dequantize().float() + 0.5
    merged: Any = ours.requantize_from_float(changed, scale="recalculate", stochastic_rounding=0)
    assert merged._layout_cls == LAYOUT_NAME
    assert merged._params.settings == ours._params.settings
    assert (merged.dequantize().float() - changed).norm() < 0.02 * changed.norm()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """torch.compile keeps what it has seen, models included."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiling_takes_every_layer_whole_and_once() -> None:
    """Twelve layers of two shapes compile to one graph, without breaks."""
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layers = torch.nn.ModuleList(
        linear(int8_tensor(base(), SETTINGS), bias=index % 2 == 0) for index in range(12)
    )
    x = inputs()

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in layers]

    block = torch.compile(run, fullgraph=True, backend=counter)
    with torch.no_grad():
        expected = run(x)
        for _ in range(3):
            for found, exact in zip(block(x), expected, strict=True):
                assert torch.equal(found, exact)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_compiled_function_serves_layers_of_one_shape_without_recompiling() -> None:
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layers = [linear(int8_tensor(base(), SETTINGS)) for _ in range(6)]

    def run(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    with torch.no_grad():
        for layer in layers:
            compiled(layer.weight, layer.bias, inputs())
    assert counter.frame_count == 1
