"""Every loadable format of a tiny Flux and Wan file samples in real ComfyUI as its reference does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import CASES, write_case
from leandit.loaders.errors import CheckpointError
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("inference")

KERNEL_ERROR = {
    "int8_tensorwise": 0.02,
    "asym_w4a8_int8": 0.02,
    "convrot_w4a4": 0.25,
    "stored": 2e-6,
}
"""Distance of the latents from those of the dequantized weights: what quantized activations cost."""


def reference(
    tiny: Any, family: str, plain: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> Any:
    patcher = tiny.build(family)
    exact = {f"{layer}.weight": weight.float() for layer, weight in weights.items()}
    patcher.model.diffusion_model.load_state_dict({**plain, **exact})
    return patcher


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_samples_as_the_weights_it_stands_for(
    tiny: Any, tmp_path: Path, family: str, name: str
) -> None:
    from leandit.host.load import load_model

    case = CASES[name]
    layers, plain = tiny.parts(family)
    path, weights = write_case(name, tmp_path, layers, plain)
    model, report = load_model(path, legacy_rotation=case.legacy_rotation)
    expected = tiny.sample(reference(tiny, family, plain, weights), family)
    assert distance(tiny.sample(model, family), expected) < KERNEL_ERROR[case.loads_as]
    (held,) = report.summary["loads_as"]
    assert held.startswith(case.loads_as)
    assert report.summary["layers_quantized"] == len(layers)
    assert report.summary["missing"] == []
    assert not any("ignored" in note for note in report.notes)
    # Memory stays as in the file.
    weight = model.model.diffusion_model.get_submodule(next(iter(layers))).weight
    assert weight._qdata.dtype in (torch.int8, torch.uint8)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].loads_as == "stored"])
def test_native_converts_and_states_the_error(tiny: Any, tmp_path: Path, name: str) -> None:
    from leandit.host.load import load_model

    layers, plain = tiny.parts("flux")
    path, weights = write_case(name, tmp_path, layers, plain)
    model, report = load_model(path, weights="native")
    four_bit = "int4" in name or "uint4" in name or "bitsandbytes" in name
    assert list(report.summary["loads_as"]) == [
        f"converted to {'w4a8_convrot' if four_bit else 'int8_convrot'}"
    ]
    assert report.summary["layers_converted"] == len(layers)
    floor = 19 if four_bit else 38
    assert all(layer["sqnr_db"] > floor for layer in report.layers)
    assert "error added by converting" in report.text
    expected = tiny.sample(reference(tiny, "flux", plain, weights), "flux")
    assert distance(tiny.sample(model, "flux"), expected) < (0.2 if four_bit else 0.03)


@pytest.mark.parametrize(
    "name",
    [
        "bitsandbytes nf4",
        *(f"int8_tensorwise with scale {shape}" for shape in ("[]", "[1]", "[N]", "[N,1]")),
        "SDNQ uint4",
        "int8_blockwise",
    ],
)
def test_a_lora_is_merged_into_every_layer(tiny: Any, tmp_path: Path, name: str) -> None:
    """Square layers included, where a scale of shape [N] would corrupt the weight silently."""
    from leandit.host.load import load_model

    layers, plain = tiny.parts("flux")
    path, weights = write_case(name, tmp_path, layers, plain)
    generator = torch.Generator().manual_seed(5)
    patches, changed = {}, {}
    for layer, weight in weights.items():
        n, k = weight.shape
        up, down = torch.randn(n, 4, generator=generator), torch.randn(4, k, generator=generator)
        change = up @ down * 0.2 / k**0.5
        patches[f"diffusion_model.{layer}.weight"] = ("diff", (change,))
        changed[layer] = weight + change.double()
    model, _ = load_model(path)
    patched = model.clone()
    assert len(patched.add_patches(patches)) == len(layers)
    expected = tiny.sample(reference(tiny, "flux", plain, changed), "flux")
    unpatched = tiny.sample(model, "flux")
    assert distance(tiny.sample(patched, "flux"), expected) < 0.6 * distance(unpatched, expected)
    assert torch.equal(tiny.sample(model, "flux"), unpatched)


@pytest.mark.parametrize("name", ["int8 ConvRot in groups of 64", "bitsandbytes nf4"])
def test_shards_and_a_prefix_load_like_one_file(tiny: Any, tmp_path: Path, name: str) -> None:
    import json

    from leandit.host.load import load_model
    from safetensors.torch import load_file

    layers, plain = tiny.parts("flux")
    path, _ = write_case(name, tmp_path, layers, plain)
    tensors = load_file(path)
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in shards.items():
        save_file({f"model.diffusion_model.{n}": tensors[n] for n in part}, tmp_path / shard)
    weight_map = {f"model.diffusion_model.{n}": s for s, part in shards.items() for n in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    one, other = load_model(path)[0], load_model(index)[0]
    assert distance(tiny.sample(other, "flux"), tiny.sample(one, "flux")) < 1e-6


def test_a_plain_file_loads_as_comfyui_loads_it(tiny: Any, tmp_path: Path) -> None:
    import comfy.sd
    from leandit.host.load import load_model

    layers, plain = tiny.parts("flux")
    path = tmp_path / "plain.safetensors"
    save_file({**plain, **{f"{name}.weight": value for name, value in layers.items()}}, path)
    ours, report = load_model(path)
    stock = comfy.sd.load_diffusion_model(str(path))
    assert torch.equal(tiny.sample(ours, "flux"), tiny.sample(stock, "flux"))
    assert "nothing in it is quantized" in report.text


def test_comfyui_can_make_the_patcher_again(tiny: Any, tmp_path: Path) -> None:
    from leandit.host.load import load_model

    layers, plain = tiny.parts("flux")
    path, _ = write_case("bitsandbytes nf4", tmp_path, layers, plain)
    model, _ = load_model(path)
    make, given = model.cached_patcher_init
    again = make(*given, disable_dynamic=True)
    assert again.model is not model.model
    assert torch.equal(tiny.sample(again, "flux"), tiny.sample(model, "flux"))


def test_the_report_names_what_is_ignored_and_what_is_missing(tiny: Any, tmp_path: Path) -> None:
    from leandit.host.load import load_model
    from safetensors.torch import load_file

    layers, plain = tiny.parts("flux")
    path, _ = write_case("int8_tensorwise with scale [N,1]", tmp_path, layers, plain)
    tensors = {f"model.diffusion_model.{name}": value for name, value in load_file(path).items()}
    del tensors["model.diffusion_model.img_in.bias"]
    tensors["model.diffusion_model.surprise.weight"] = torch.ones(3)
    tensors["vae.decoder.conv_in.weight"] = torch.ones(3)
    save_file(tensors, path)
    _, report = load_model(path)
    notes = "\n".join(report.notes)
    assert "vae.decoder.conv_in.weight" in notes
    assert "ignored, the model has no place for: surprise.weight" in notes
    assert "NOT IN THE FILE" in notes
    assert report.summary["missing"] == ["img_in.bias"]


def test_an_int8_matrix_of_no_known_format_is_refused_with_its_keys(
    tiny: Any, tmp_path: Path
) -> None:
    from leandit.host.load import load_model

    layers, plain = tiny.parts("flux")
    tensors = {f"{name}.weight": value.to(torch.int8) for name, value in layers.items()}
    save_file({**plain, **tensors}, tmp_path / "noise.safetensors")
    with pytest.raises(CheckpointError, match=r"20 layers that would load wrong") as caught:
        load_model(tmp_path / "noise.safetensors")
    assert "img_mlp.0.bias F32[1024], double_blocks" in str(caught.value)
    assert "img_mlp.0.weight I8[1024, 256]" in str(caught.value)


def test_a_file_of_no_known_model_is_refused(comfyui: Path, tmp_path: Path) -> None:
    from leandit.host.errors import HostError
    from leandit.host.load import load_model

    save_file({"some.weight": torch.ones(4, 4)}, tmp_path / "unknown.safetensors")
    with pytest.raises(HostError, match="does not recognise this model"):
        load_model(tmp_path / "unknown.safetensors")
