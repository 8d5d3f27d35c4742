"""Layerwise offload on models of a real ComfyUI, with a device that copies as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from late_device import LateDevice, streams
from leandit.kernels.attention.select import AttentionSettings
from leandit.kernels.dispatch import LinearSettings
from leandit.kernels.row_split import RowSplit
from leandit.quant.linear_plan import filters_from
from leandit.quant.offload_settings import OffloadSettings
from leandit.quant.settings import settings_from
from offload_cases import LONGER, hooks, longer, parameters, wrapper_of

pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("prefetch", ["1", "3"])
@pytest.mark.parametrize("family", LONGER)
def test_the_output_is_the_same_bit_for_bit(
    tiny: Any, offload: Any, family: str, prefetch: str
) -> None:
    model = longer(tiny, family)
    expected = tiny.sample(model, family)
    before = parameters(model)
    streamed = offload(model, prefetch=prefetch)
    assert torch.equal(tiny.sample(streamed, family), expected)
    assert parameters(model) == before
    assert hooks(model) == 0
    (device,) = streams()
    sizes = [block.nbytes for block in device.blocks]
    moving = [index for index, size in enumerate(sizes) if size]
    assert len(moving) == len(sizes) - 1
    assert set(device.copies) == set(moving)
    # One copy of each block in every forward, and what was copied ahead for one more.
    assert len(device.copies) >= 2 * len(moving) - int(prefetch) - 1
    assert device.most_bytes == (int(prefetch) + 1) * max(sizes)
    summary = wrapper_of(streamed).last_report.summary
    assert summary["streaming"] is True
    assert summary["streamed_bytes_per_step"] == sum(sizes)
    assert torch.equal(tiny.sample(model, family), expected)


ORDERS = list(permutations(["quantize", "row split", "attention", "offload"]))


@pytest.mark.parametrize("order", ORDERS, ids=[", ".join(order) for order in ORDERS])
def test_it_chains_with_the_other_nodes_in_any_order(
    tiny: Any, offload: Any, order: tuple[str, ...]
) -> None:
    from leandit.host.attention import select_attention
    from leandit.host.quantize import quantize_model
    from leandit.host.row_split import row_split_linear

    routing = LinearSettings(RowSplit("fixed", 7, 1))
    steps: dict[str, Callable[[Any], Any]] = {
        "quantize": lambda m: quantize_model(m, settings_from())[0],
        "row split": lambda m: row_split_linear(m, routing, filters_from())[0],
        "attention": lambda m: select_attention(m, AttentionSettings(dense="sdpa")),
        "offload": offload,
    }
    model = longer(tiny, "flux", torch.bfloat16)
    plain = model
    for name in order:
        model = steps[name](model)
        plain = plain if name == "offload" else steps[name](plain)
    expected = tiny.sample(plain, "flux")
    assert torch.equal(tiny.sample(model, "flux"), expected)
    (device,) = streams()
    assert len(set(device.copies)) == 5
    int8 = sum(b.nbytes for b in device.blocks)
    assert int8 < 0.6 * sum(
        p.numel() * 2 for n, p in plain.model.diffusion_model.named_parameters() if "blocks." in n
    )


def test_a_node_after_a_node_replaces_it(tiny: Any, offload: Any) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    assert torch.equal(tiny.sample(offload(offload(model)), "wan"), expected)
    assert len(streams()) == 1
    LateDevice.made.clear()
    assert torch.equal(tiny.sample(offload(offload(model), mode="off"), "wan"), expected)
    assert not LateDevice.made


class Packed(torch.Tensor):
    """Like the tensors of ComfyUI-GGUF: bytes, and in attributes what they stand for."""

    kind: str


def test_packed_tensors_of_other_packages_stream_with_their_attributes(
    tiny: Any, offload: Any
) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    layer = model.model.diffusion_model.blocks[2].ffn[0]
    packed: Any = torch.nn.Parameter(layer.weight.clone().as_subclass(Packed), False)
    packed.kind = "Q8_0"
    layer.weight = packed
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = layer._parameters["weight"]
        seen.append((type(weight), weight.kind, id(weight)))
        plain = weight.as_subclass(torch.Tensor)
        return torch.nn.functional.linear(x, plain, layer.bias)

    layer.forward = forward
    assert torch.equal(tiny.sample(offload(model), "wan"), expected)
    assert {entry[:2] for entry in seen} == {(Packed, "Q8_0")}
    assert id(layer.weight) not in {entry[2] for entry in seen}


def test_on_a_cpu_the_node_changes_nothing_and_says_so(tiny: Any) -> None:
    from leandit.host.offload import layerwise_offload

    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    clone, report = layerwise_offload(model, OffloadSettings())
    assert "ComfyUI runs on the CPU" in report.text
    assert report.summary["manager"] == "cpu"
    assert report.summary["blocks"] == 5
    assert torch.equal(tiny.sample(clone, "wan"), expected)
    after = wrapper_of(clone).last_report
    assert "ComfyUI runs on the CPU" in after.text


def test_report_mode_measures_and_changes_nothing(tiny: Any, offload: Any) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan", 4)
    watched = offload(model, mode="report")
    assert torch.equal(tiny.sample(watched, "wan", 4), expected)
    report = wrapper_of(watched).last_report
    assert report.summary["streaming"] is False
    assert report.summary["forwards"] == 4
    assert report.summary["step_seconds"] > 0
    assert not streams()
    assert report.summary["streamed_bytes_per_step"] == 0  # all of it is loaded


@pytest.mark.parametrize(
    ("family", "queues"), [("minimax_h3", True), ("flux", False), ("wan", False)]
)
def test_models_with_a_queue_of_their_own_are_known(tiny: Any, family: str, queues: bool) -> None:
    from leandit.host.managers import has_own_queue

    assert has_own_queue(tiny.build(family).model.diffusion_model) is queues
