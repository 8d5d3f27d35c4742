"""Row-Split Linear on models of a real ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.kernels.dispatch import LinearSettings
from leandit.kernels.row_split import RowSplit
from leandit.quant.errors import SettingsError
from leandit.quant.int8_layout import LAYOUT_NAME
from leandit.quant.linear_plan import filters_from
from leandit.quant.settings import settings_from
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("inference")

FAMILIES = ["flux", "wan", "qwen_image", "minimax_h3"]


def quantized(tiny: Any, family: str) -> Any:
    from leandit.host.quantize import quantize_model

    return quantize_model(tiny.build(family, torch.bfloat16), settings_from())[0]


def routed(model: Any, rows: int = 7, **filters: Any) -> tuple[Any, Any]:
    from leandit.host.row_split import row_split_linear

    settings = LinearSettings(RowSplit("fixed", rows, 1))
    return row_split_linear(model, settings, filters_from(**filters))


def layouts(model: Any) -> dict[str, str]:
    return {
        name: weight._layout_cls
        for name, weight in model.model.diffusion_model.named_parameters()
        if hasattr(weight, "_layout_cls")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_does_not_depend_on_the_chunks(tiny: Any, family: str) -> None:
    model = quantized(tiny, family)
    before = tiny.sample(model, family)
    split, report = routed(model, 7)
    whole, _ = routed(model, 1 << 20)
    outputs = [tiny.sample(patcher, family) for patcher in (split, whole)]
    assert torch.equal(outputs[0], outputs[1])
    assert (outputs[0] - before).norm() < 0.02 * before.norm()
    assert report.summary["layers_routed"] == len(layouts(split)) > 0
    assert set(layouts(split).values()) == {LAYOUT_NAME}
    assert {row["backend"] for row in report.summary["shapes"]} == {"cpu"}
    # The input model is as it was, and holds the same bytes.
    assert set(layouts(model).values()) == {"TensorWiseINT8Layout"}
    assert torch.equal(tiny.sample(model, family), before)
    name = next(iter(layouts(model))).removesuffix(".weight")
    one, other = (m.model.diffusion_model.get_submodule(name).weight for m in (model, split))
    assert one._qdata.data_ptr() == other._qdata.data_ptr()


def test_the_dispatcher_really_runs_every_layer(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from leandit.kernels.backends.cpu import CpuBackend

    rows: list[int] = []
    run = CpuBackend.linear

    def counted(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(x.shape[0])
        return run(self, x, *rest)

    monkeypatch.setattr(CpuBackend, "linear", counted)
    split, report = routed(quantized(tiny, "flux"), 7)
    tiny.sample(split, "flux", steps=1)
    assert len(rows) > report.summary["layers_routed"]
    assert max(rows) == 7


def test_a_file_that_comfyui_loads_is_routed_and_saved_as_it_was(tiny: Any, tmp_path: Path) -> None:
    import comfy.sd
    from leandit.host.save import save_model

    source = quantized(tiny, "flux")
    comfy.sd.save_checkpoint(str(tmp_path / "a.safetensors"), source, metadata={"format": "pt"})
    stock = comfy.sd.load_diffusion_model(str(tmp_path / "a.safetensors"))
    split, _ = routed(stock)
    comfy.sd.save_checkpoint(str(tmp_path / "b.safetensors"), split, metadata={"format": "pt"})
    save_model(split, tmp_path / "c.safetensors", overwrite=False)
    first = load_file(tmp_path / "a.safetensors")
    again = load_file(tmp_path / "b.safetensors")
    ours = load_file(tmp_path / "c.safetensors")
    assert set(again) == set(first)
    prefix = "model.diffusion_model."
    for name, tensor in first.items():
        assert torch.equal(again[name].float(), tensor.float()), name
        if tensor.dtype == torch.int8:
            assert torch.equal(ours[name.removeprefix(prefix)], tensor)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_lora_works_on_either_side(tiny: Any, order: str) -> None:
    model = quantized(tiny, "flux")
    change = 0.05 * torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    patch = {"diffusion_model.double_blocks.0.img_mlp.0.weight": ("diff", (change,))}
    expected = model.clone()
    expected.add_patches(patch)
    plain, merged = tiny.sample(model, "flux"), tiny.sample(expected, "flux")
    if order == "before":
        split, _ = routed(expected)
    else:
        split, _ = routed(model)
        assert split.add_patches(patch)
    found = tiny.sample(split, "flux")
    assert (found - merged).norm() < 0.3 * (plain - merged).norm()
    without, _ = routed(model)
    assert torch.equal(tiny.sample(without, "flux"), tiny.sample(routed(model, 50)[0], "flux"))


def test_filters_leave_layers_as_they_are_and_the_report_says_why(tiny: Any) -> None:
    model = quantized(tiny, "flux")
    split, report = routed(
        model, include="double_blocks.*", exclude="*.txt_*", max_out_features=800
    )
    names = {name for name, layout in layouts(split).items() if layout == LAYOUT_NAME}
    assert names and all("double_blocks" in name and "txt" not in name for name in names)
    reasons = report.summary["kept_reasons"]
    assert reasons["not included"] > 0
    assert reasons["excluded by '*.txt_*'"] > 0
    assert reasons["N=1024 is above max_out_features 800"] == 2
    assert reasons["not an int8 layer"] > 0


def test_nothing_to_do_leaves_the_model_and_says_so(tiny: Any) -> None:
    from leandit.host.row_split import row_split_linear

    plain = tiny.build("flux", torch.bfloat16)
    same, report = routed(plain)
    assert same.model is plain.model
    assert "no int8 layers" in report.text
    off, report = row_split_linear(plain, LinearSettings(RowSplit("off")), filters_from())
    assert off.model is plain.model and report.text == "mode off: the model is unchanged"


def test_a_backend_that_cannot_run_here_is_named_with_its_reason(tiny: Any) -> None:
    from leandit.host.row_split import row_split_linear

    model = quantized(tiny, "flux")
    settings = LinearSettings(RowSplit("fixed"), backend="leandit-cuda")
    split, report = row_split_linear(model, settings, filters_from())
    assert "not used, leandit-cuda: runs on NVIDIA cards only" in report.text
    assert tiny.sample(split, "flux").isfinite().all()
    with pytest.raises(SettingsError, match="unknown backend 'fast'; valid: auto, cpu"):
        row_split_linear(model, LinearSettings(backend="fast"), filters_from())


def test_comfyui_can_make_the_patcher_again(tiny: Any) -> None:
    split, _ = routed(quantized(tiny, "flux"))
    make, given = split.cached_patcher_init
    again = make(*given, disable_dynamic=True)
    assert set(layouts(again).values()) == {LAYOUT_NAME}
    assert torch.equal(tiny.sample(again, "flux"), tiny.sample(split, "flux"))
