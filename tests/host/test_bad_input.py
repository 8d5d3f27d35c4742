"""What cannot be quantized is refused in words, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("inference")

PROJ = "diffusion_model.double_blocks.1.img_attn.proj.weight"


@pytest.fixture
def quantize(comfyui: Any) -> Any:
    from leandit.host.quantize import quantize_model
    from leandit.quant.settings import settings_from

    def run(model: Any, loras: str = "bake", device: str = "auto", **settings: str) -> Any:
        return quantize_model(model, settings_from(**settings), loras, device)

    return run


def weights(patcher: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in patcher.model.state_dict().items()}


def assert_unchanged(patcher: Any, before: dict[str, torch.Tensor]) -> None:
    for key, value in patcher.model.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[key].view(torch.uint8)), key


def test_a_weight_with_nan_names_the_layer_and_changes_nothing(tiny: Any, quantize: Any) -> None:
    from leandit.quant.errors import WeightError

    source = tiny.build("flux", torch.bfloat16)
    source.model.diffusion_model.double_blocks[1].img_attn.proj.weight.data[3, 4] = float("nan")
    before = weights(source)
    with pytest.raises(
        WeightError, match=r"'double_blocks.1.img_attn.proj' .*nan at row 3, column 4"
    ):
        quantize(source)
    assert_unchanged(source, before)


def test_a_lora_with_nan_names_the_layer(tiny: Any, quantize: Any) -> None:
    from leandit.quant.errors import WeightError

    source = tiny.build("flux", torch.bfloat16).clone()
    source.add_patches({PROJ: ("diff", (torch.full((256, 256), float("nan")),))})
    before = weights(source)
    with pytest.raises(WeightError, match=r"'double_blocks.1.img_attn.proj' holds 65536 values"):
        quantize(source)
    assert_unchanged(source, before)
    assert set(source.patches) == {PROJ}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"format": "int7"}, "unknown format 'int7'"),
        ({"preset": "sd9"}, "unknown preset 'sd9'"),
        ({"include": "re:["}, "not a valid regular expression"),
        ({"loras": "merge"}, "unknown loras 'merge'; valid values: bake, keep"),
        ({"device": "npu"}, "unknown device 'npu'; valid values: auto, gpu, cpu"),
        ({"device": "gpu"}, "ComfyUI runs on the CPU"),
    ],
    ids=lambda value: "=".join(*value.items()) if isinstance(value, dict) else None,
)
def test_a_wrong_setting_is_refused(
    tiny: Any, quantize: Any, arguments: dict[str, str], words: str
) -> None:
    from leandit.quant.errors import SettingsError

    source = tiny.build("flux", torch.bfloat16)
    before = weights(source)
    with pytest.raises(SettingsError) as caught:
        quantize(source, **arguments)
    assert words in str(caught.value)
    assert_unchanged(source, before)


def test_no_selected_layer_is_an_error_with_the_reasons(tiny: Any, quantize: Any) -> None:
    from leandit.quant.errors import NothingSelectedError

    source = tiny.build("flux", torch.bfloat16)
    before = weights(source)
    with pytest.raises(NothingSelectedError, match=r"excluded by '\*'"):
        quantize(source, exclude="*")
    assert_unchanged(source, before)


def test_a_model_without_linears_is_an_error(tiny: Any, quantize: Any) -> None:
    from leandit.quant.errors import NothingSelectedError

    source = tiny.build("flux", torch.bfloat16)
    source.model.diffusion_model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1))
    with pytest.raises(NothingSelectedError, match="no Linear layers"):
        quantize(source)


def test_an_interrupt_between_layers_changes_nothing_and_frees_everything(
    tiny: Any, quantize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc

    import comfy.model_management
    import comfy.utils
    from comfy.quant_ops import QuantizedTensor
    from leandit.host import quantize as module

    earlier = {id(thing) for thing in gc.get_objects() if type(thing) is QuantizedTensor}
    source = tiny.build("flux", torch.bfloat16)
    before, expected = weights(source), tiny.sample(source, "flux")
    worked: list[str] = []
    shown: list[tuple[int, int]] = []
    original = module.quantize_and_measure

    def cancel_in_the_seventh(weight: Any, format: Any, group: Any, name: str) -> Any:
        worked.append(name)
        if len(worked) == 7:
            comfy.model_management.interrupt_current_processing()
        return original(weight, format, group, name)

    monkeypatch.setattr(module, "quantize_and_measure", cancel_in_the_seventh)
    comfy.utils.set_progress_bar_global_hook(
        lambda value, total, preview, **_: shown.append((value, total))
    )
    try:
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            quantize(source)
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
        comfy.model_management.interrupt_current_processing(False)
    gc.collect()
    assert len(worked) == 7
    assert shown[0] == (1, 20)
    left = [thing for thing in gc.get_objects() if type(thing) is QuantizedTensor]
    assert not [thing for thing in left if id(thing) not in earlier]
    assert_unchanged(source, before)
    assert torch.equal(tiny.sample(source, "flux"), expected)


def test_a_compiled_model_is_refused_with_the_order_that_works(tiny: Any, quantize: Any) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from leandit.host.errors import HostError

    compiled = tiny.build("flux", torch.bfloat16).clone()
    set_torch_compile_wrapper(compiled, backend="eager")
    with pytest.raises(HostError, match="put that node after LeanDiT's"):
        quantize(compiled)


def test_a_compiled_quantized_model_samples_the_same(tiny: Any, quantize: Any) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    quantized, _ = quantize(tiny.build("wan", torch.bfloat16))
    expected = tiny.sample(quantized, "wan")
    compiled = quantized.clone(disable_dynamic=True)
    set_torch_compile_wrapper(compiled, backend="eager")
    assert torch.equal(tiny.sample(compiled, "wan"), expected)


def test_injections_and_replaced_modules_are_refused(tiny: Any, quantize: Any) -> None:
    from comfy.patcher_extension import PatcherInjection
    from leandit.host.errors import HostError

    injected = tiny.build("flux", torch.bfloat16).clone()
    injected.set_injections("bypass_lora", [PatcherInjection(lambda p: None, lambda p: None)])
    with pytest.raises(HostError, match="injections 'bypass_lora'"):
        quantize(injected)
    replaced = tiny.build("flux", torch.bfloat16).clone()
    replaced.add_object_patch("diffusion_model.img_in", torch.nn.Linear(64, 256))
    with pytest.raises(HostError, match=r"'diffusion_model\.img_in'"):
        quantize(replaced)


def test_a_patched_callable_that_may_hold_the_originals_modules_is_refused(
    tiny: Any, quantize: Any
) -> None:
    import functools

    from leandit.host.errors import HostError

    source = tiny.build("flux", torch.bfloat16).clone()
    block = source.model.diffusion_model.double_blocks[0]
    key = "diffusion_model.double_blocks.0.forward"
    source.add_object_patch(key, functools.partial(type(block).forward, block))
    with pytest.raises(HostError, match=r"'diffusion_model\.double_blocks\.0\.forward'"):
        quantize(source)


def test_a_model_spread_over_gpus_is_refused(tiny: Any, quantize: Any) -> None:
    from leandit.host.errors import HostError

    source = tiny.build("flux", torch.bfloat16).clone()
    source.set_additional_models("multigpu", [tiny.build("flux", torch.bfloat16)])
    with pytest.raises(HostError, match="spread over several GPUs"):
        quantize(source)


def test_something_that_cannot_be_copied_is_an_error_with_a_remedy(
    tiny: Any, quantize: Any
) -> None:
    from leandit.host.errors import HostError

    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise ValueError("no copies")

    source = tiny.build("flux", torch.bfloat16)
    source.model.diffusion_model.double_blocks[0].thing = Uncopyable()
    with pytest.raises(
        HostError, match=r"no copies\. Put LeanDiT's node directly after the loader"
    ):
        quantize(source)


def test_a_compute_dtype_set_on_the_model_is_noted(tiny: Any, quantize: Any) -> None:
    source = tiny.build("flux", torch.bfloat16).clone()
    source.set_model_compute_dtype(torch.bfloat16)
    quantized, report = quantize(source)
    assert any("no integer kernel runs" in note for note in report.notes)
    weight = quantized.model.diffusion_model.double_blocks[0].img_attn.qkv.weight
    assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_weights_are_quantized_from_the_numbers_they_hold(
    tiny: Any, quantize: Any, dtype: torch.dtype
) -> None:
    source = tiny.build("flux", torch.bfloat16)
    same = tiny.build("flux", torch.bfloat16)
    for model, held in ((source, dtype), (same, torch.float32)):
        for block in model.model.diffusion_model.single_blocks:
            block.linear1.weight.data = block.linear1.weight.data.to(dtype).to(held)
    quantized, report = quantize(source)
    expected, _ = quantize(same)
    weights = [
        model.model.diffusion_model.single_blocks[0].linear1.weight
        for model in (quantized, expected)
    ]
    assert torch.equal(weights[0]._qdata, weights[1]._qdata)
    assert torch.equal(weights[0]._params.scale, weights[1]._params.scale)
    name = str(dtype).removeprefix("torch.")
    assert any(f"2 layers were quantized before ({name})" in note for note in report.notes)
    assert source.model.diffusion_model.single_blocks[0].linear1.weight.dtype == dtype
    assert tiny.sample(quantized, "flux").isfinite().all()


def test_a_gguf_weight_is_kept_and_reported(tiny: Any, quantize: Any) -> None:
    """The GGUF loader holds packed bytes in a Parameter subclass with the type as attribute."""

    class PackedTensor(torch.nn.Parameter):
        tensor_type = "Q4_K"

    source = tiny.build("flux", torch.bfloat16)
    linear = source.model.diffusion_model.single_blocks[0].linear1
    linear.weight = PackedTensor(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    quantized, report = quantize(source)
    reasons = {layer["name"]: layer["reason"] for layer in report.layers}
    assert reasons["single_blocks.0.linear1"] == "already quantized (GGUF Q4_K)"
    kept = quantized.model.diffusion_model.single_blocks[0].linear1.weight
    assert type(kept) is PackedTensor
    assert kept.tensor_type == "Q4_K"


def test_an_nvfp4_weight_is_kept_with_its_scales(tiny: Any, quantize: Any) -> None:
    import comfy.ops
    from comfy.quant_ops import QuantizedTensor

    source = tiny.build("flux", torch.bfloat16)
    block = source.model.diffusion_model.single_blocks[0]
    layer = comfy.ops.mixed_precision_ops({}, torch.float32).Linear(256, 1792)
    weight = QuantizedTensor.from_float(block.linear1.weight.float(), "TensorCoreNVFP4Layout")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = block.linear1.bias
    layer.quant_format, layer.layout_type = "nvfp4", "TensorCoreNVFP4Layout"
    block.linear1 = layer
    quantized, report = quantize(source)
    reasons = {found["name"]: found["reason"] for found in report.layers}
    assert reasons["single_blocks.0.linear1"] == "already quantized (nvfp4)"
    kept = quantized.model.diffusion_model.single_blocks[0].linear1.weight
    assert torch.equal(kept._qdata, weight._qdata)
    assert torch.equal(kept.dequantize(), weight.dequantize())


def test_layers_that_other_nodes_hold_are_kept_with_the_reason(tiny: Any, quantize: Any) -> None:
    source = tiny.build("flux", torch.bfloat16)
    model = source.model.diffusion_model
    model.double_blocks[0].img_mlp[0].forward = lambda x: x

    class OwnLinear(torch.nn.Linear):
        pass

    model.double_blocks[0].img_mlp[2] = OwnLinear(1024, 256)
    source.add_weight_wrapper(PROJ, lambda weight: weight)
    patched = model.single_blocks[0].linear1
    source.add_object_patch("diffusion_model.single_blocks.0.linear1.forward", patched.forward)
    _, report = quantize(source)
    reasons = {layer["name"]: layer["reason"] for layer in report.layers}
    assert reasons["double_blocks.0.img_mlp.0"] == "another node has replaced its forward"
    assert reasons["single_blocks.0.linear1"] == "another node has replaced its forward"
    assert "a layer of its own kind" in reasons["double_blocks.0.img_mlp.2"]
    assert "computes its weight in every call" in reasons["double_blocks.1.img_attn.proj"]
