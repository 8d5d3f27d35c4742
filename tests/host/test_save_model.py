"""Saving to a native file: a fixed point, the same bytes as the command line's, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import write_case
from leandit.loaders.convert import quantize_file
from leandit.loaders.errors import CheckpointError
from leandit.quant.settings import settings_from
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("inference")


def source_file(tiny: Any, folder: Path) -> Path:
    """A tiny Flux in bf16, without prefix or metadata."""
    state = tiny.build("flux", torch.bfloat16).model.diffusion_model.state_dict()
    path = folder / "source.safetensors"
    save_file({name: value.clone() for name, value in state.items()}, path)
    return path


@pytest.mark.parametrize("format", ["int8_convrot", "int8", "w4a8_convrot", "w4a4_convrot"])
def test_node_and_command_line_write_the_same_bytes_and_loading_and_saving_keeps_them(
    tiny: Any, tmp_path: Path, format: str
) -> None:
    import comfy.sd
    from leandit.host.load import load_model
    from leandit.host.quantize import quantize_model
    from leandit.host.save import save_model

    path = source_file(tiny, tmp_path)
    settings = settings_from(format)
    quantize_file(path, tmp_path / "cli.safetensors", settings)
    # As on a GPU; on a CPU ComfyUI turns the plain tensors into float32 when it loads them.
    options = {"dtype": torch.bfloat16}
    source = comfy.sd.load_diffusion_model(str(path), model_options=options)
    twin, _ = quantize_model(source, settings)
    save_model(twin, tmp_path / "node.safetensors", overwrite=False)
    expected = (tmp_path / "cli.safetensors").read_bytes()
    assert (tmp_path / "node.safetensors").read_bytes() == expected
    first = load_file(tmp_path / "cli.safetensors")
    for step in range(2):
        loaded, _ = load_model(
            tmp_path / ("cli.safetensors" if step == 0 else "again0.safetensors")
        )
        report = save_model(loaded, tmp_path / f"again{step}.safetensors", overwrite=False)
        assert "read back" in report.text
        again = load_file(tmp_path / f"again{step}.safetensors")
        assert set(again) == set(first)
        for name, tensor in first.items():
            plain = tensor.dtype == torch.bfloat16
            assert torch.equal(again[name].float(), tensor.float()), name
            assert plain or again[name].dtype == tensor.dtype, name
    fixed = (tmp_path / "again0.safetensors").read_bytes()
    assert (tmp_path / "again1.safetensors").read_bytes() == fixed
    stock = comfy.sd.load_diffusion_model(str(tmp_path / "again1.safetensors"))
    # Weights mapped from a file lie differently in memory, and BLAS rounds products on them by 1e-7
    # differently, which moves an activation now and then to the next of its 15 or 255 integers.
    difference = tiny.sample(stock, "flux") - tiny.sample(twin, "flux")
    bound = 0.2 if format == "w4a4_convrot" else 1e-2
    assert difference.norm() < bound * tiny.sample(twin, "flux").norm()


def test_loras_are_merged(tiny: Any, tmp_path: Path) -> None:
    import comfy.sd
    from leandit.host.quantize import quantize_model
    from leandit.host.save import save_model

    twin, _ = quantize_model(tiny.build("flux", torch.bfloat16), settings_from("int8_convrot"))
    generator = torch.Generator().manual_seed(0)
    change = 0.05 * torch.randn(1024, 256, generator=generator)
    patches = {
        "diffusion_model.double_blocks.0.img_mlp.0.weight": ("diff", (change,)),
        "diffusion_model.img_in.bias": ("diff", (torch.ones(256),)),
    }
    patched = twin.clone()
    assert len(patched.add_patches(patches)) == 2
    before = twin.model.state_dict()["diffusion_model.img_in.bias"].clone()
    report = save_model(patched, tmp_path / "lora.safetensors", overwrite=False)
    assert report.summary["loras_baked"] == 2
    stock = comfy.sd.load_diffusion_model(str(tmp_path / "lora.safetensors"))
    found = stock.model.diffusion_model.double_blocks[0].img_mlp[0].weight.dequantize()
    held = twin.model.diffusion_model.double_blocks[0].img_mlp[0].weight.dequantize()
    assert ((found - held - change).norm() / change.norm()) < 0.03
    assert torch.equal(twin.model.state_dict()["diffusion_model.img_in.bias"], before)


def test_a_file_is_replaced_only_when_told(tiny: Any, tmp_path: Path) -> None:
    from leandit.host.save import save_model

    model = tiny.build("flux", torch.bfloat16)
    path = tmp_path / "kept.safetensors"
    path.write_text("precious")
    with pytest.raises(CheckpointError, match="exists already; choose another name or switch"):
        save_model(model, path, overwrite=False)
    assert path.read_text() == "precious"
    save_model(model, path, overwrite=True)
    assert load_file(path)["img_in.weight"].dtype == torch.bfloat16


def test_weights_no_native_file_can_hold_are_refused(tiny: Any, tmp_path: Path) -> None:
    from leandit.host.errors import HostError
    from leandit.host.load import load_model
    from leandit.host.save import save_model

    state = tiny.build("flux").model.diffusion_model.state_dict()
    layer = "double_blocks.0.img_mlp.0"
    weights = {layer: state.pop(f"{layer}.weight")}
    path, _ = write_case("bitsandbytes nf4", tmp_path, weights, state)
    model, _ = load_model(path)
    with pytest.raises(HostError, match="1 layers are held as bnb_nf4"):
        save_model(model, tmp_path / "out.safetensors", overwrite=False)
    native, _ = load_model(path, weights="native")
    save_model(native, tmp_path / "out.safetensors", overwrite=False)
    assert f"{layer}.comfy_quant" in load_file(tmp_path / "out.safetensors")


def test_cancel_leaves_nothing(tiny: Any, tmp_path: Path) -> None:
    import comfy.model_management
    from leandit.host.save import save_model

    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        save_model(tiny.build("flux"), tmp_path / "out.safetensors", overwrite=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["float8", "bitsandbytes nf4", "int8_blockwise"])
def test_node_and_command_line_quantize_what_was_quantized_before_to_the_same_bits(
    tiny: Any, tmp_path: Path, source: str
) -> None:
    """fp8 in the form ComfyUI's own checkpoints have, and formats that only this package loads."""
    from leandit.host.load import load_model
    from leandit.host.quantize import quantize_model

    layers, plain = tiny.parts("flux")
    if source == "float8":
        path, tensors = tmp_path / "model.safetensors", dict(plain)
        for name, weight in layers.items():
            scale = weight.abs().max() / 448
            tensors[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}.scale_weight"] = scale
        tensors["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
        save_file(tensors, path)
    else:
        path, _ = write_case(source, tmp_path, layers, plain)
    quantize_file(path, tmp_path / "cli.safetensors", settings_from())
    model, _ = load_model(path)
    twin, report = quantize_model(model, settings_from())
    assert any(f"{len(layers)} layers were quantized before" in note for note in report.notes)
    found = load_file(tmp_path / "cli.safetensors")
    for name in layers:
        weight = twin.model.diffusion_model.get_submodule(name).weight
        assert torch.equal(found[f"{name}.weight"], weight._qdata)
        assert torch.equal(found[f"{name}.weight_scale"], weight._params.scale)


def test_fp8_layers_are_written_as_they_are_and_stock_comfyui_loads_them(
    tiny: Any, tmp_path: Path
) -> None:
    import comfy.sd
    from leandit.host.errors import HostError
    from leandit.host.load import load_model
    from leandit.host.quantize import quantize_model
    from leandit.host.save import save_model

    layers, plain = tiny.parts("flux")
    tensors = dict(plain)
    for name, weight in layers.items():
        scale = weight.abs().max() / 448
        tensors[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = scale
    save_file(tensors, tmp_path / "fp8.safetensors")
    model, _ = load_model(tmp_path / "fp8.safetensors")
    twin, _ = quantize_model(model, settings_from(exclude="single_blocks.*"))
    save_model(twin, tmp_path / "out.safetensors", overwrite=False)
    found = load_file(tmp_path / "out.safetensors")
    kept = "single_blocks.1.linear2"
    assert torch.equal(
        found[f"{kept}.weight"].view(torch.uint8), tensors[f"{kept}.weight"].view(torch.uint8)
    )
    assert found["double_blocks.1.img_mlp.0.weight"].dtype == torch.int8
    stock = comfy.sd.load_diffusion_model(str(tmp_path / "out.safetensors"))
    difference = tiny.sample(stock, "flux") - tiny.sample(twin, "flux")
    assert difference.norm() < 1e-2 * tiny.sample(twin, "flux").norm()
    patched = twin.clone()
    patched.add_patches({f"diffusion_model.{kept}.weight": ("diff", (layers[kept],))})
    with pytest.raises(HostError, match="TensorCoreFP8E4M3Layout with a LoRA"):
        save_model(patched, tmp_path / "no.safetensors", overwrite=False)
    assert not (tmp_path / "no.safetensors").exists()


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "SDNQ uint4 with SVD", "int8_blockwise"])
def test_comfyuis_own_save_of_a_foreign_format_is_read_back(
    tiny: Any, tmp_path: Path, name: str
) -> None:
    import comfy.sd
    from leandit.host.load import load_model

    layers, plain = tiny.parts("flux")
    path, _ = write_case(name, tmp_path, layers, plain)
    model, _ = load_model(path)
    comfy.sd.save_checkpoint(str(tmp_path / "saved.safetensors"), model, metadata={"format": "pt"})
    again, report = load_model(tmp_path / "saved.safetensors")
    assert report.summary["layers_quantized"] == len(layers)
    for layer in layers:
        one, other = (m.model.diffusion_model.get_submodule(layer).weight for m in (model, again))
        assert torch.equal(one._qdata, other._qdata)
    difference = tiny.sample(again, "flux") - tiny.sample(model, "flux")
    assert difference.norm() < 1e-5 * tiny.sample(model, "flux").norm()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("convrot_w4a4 for int8 activations", None),
        ("asym_w4a8_int8 with 6 bits", "of a kind this package only reads, with a LoRA"),
    ],
)
def test_a_lora_on_a_layer_of_a_rarer_kind_is_merged_or_refused_before_anything_is_written(
    tiny: Any, tmp_path: Path, name: str, words: str | None
) -> None:
    from leandit.host.errors import HostError
    from leandit.host.load import load_model
    from leandit.host.save import save_model

    layers, plain = tiny.parts("flux")
    path, _ = write_case(name, tmp_path, layers, plain)
    model, _ = load_model(path)
    patched = model.clone()
    change = 0.05 * torch.randn(1024, 256)
    patched.add_patches({"diffusion_model.double_blocks.0.img_mlp.0.weight": ("diff", (change,))})
    if words is not None:
        with pytest.raises(HostError, match=words):
            save_model(patched, tmp_path / "out.safetensors", overwrite=False)
        assert not (tmp_path / "out.safetensors").exists()
        return
    save_model(patched, tmp_path / "out.safetensors", overwrite=False)
    label = load_file(tmp_path / "out.safetensors")["double_blocks.0.img_mlp.0.comfy_quant"]
    assert b'"linear_dtype": "int8"' in bytes(label.tolist())
