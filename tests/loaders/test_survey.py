"""What a file holds: prefixes, parts beside the model, and what must not be passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from leandit.loaders.contents import contents, to_float
from leandit.loaders.convert import quantize_file
from leandit.loaders.errors import CheckpointError
from leandit.loaders.inspect import inspect_file
from leandit.loaders.reader import open_checkpoint
from leandit.loaders.survey import Survey, survey
from leandit.quant.settings import settings_from
from safetensors.torch import load_file, save_file

INT8 = {"format": "int8_tensorwise"}


def label(config: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def layer(name: str, config: object | None = INT8) -> dict[str, torch.Tensor]:
    codes = torch.randint(-127, 127, (32, 64), dtype=torch.int8)
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": torch.full((32, 1), 0.01)}
    return tensors if config is None else tensors | {f"{name}.comfy_quant": label(config)}


def surveyed(tensors: dict[str, torch.Tensor], folder: Path, rotation: str = "auto") -> Survey:
    save_file(tensors, folder / "in.safetensors")
    return survey(open_checkpoint(folder / "in.safetensors"), rotation)


def test_a_stray_name_does_not_make_a_prefix(tmp_path: Path) -> None:
    tensors = layer("blocks.0.q") | {"model.version": torch.ones(1)}
    found = surveyed(tensors, tmp_path)
    assert found.prefix == ""
    assert [w.name for w in found.layers] == ["blocks.0.q"]


def test_a_model_under_two_prefixes_is_refused(tmp_path: Path) -> None:
    tensors = layer("model.diffusion_model.blocks.0.q") | layer("model.diffusion_model.blocks.2.q")
    found = surveyed(tensors | layer("blocks.1.q"), tmp_path)
    with pytest.raises(CheckpointError, match=r"outside of the prefix 'model.diffusion_model.'"):
        found.require_loadable()


def test_an_unlabelled_layer_beside_the_model_hinders_converting_and_not_loading(
    tmp_path: Path,
) -> None:
    tensors = {f"model.layers.{i}.q.weight": torch.ones(32, 64) for i in range(2)}
    found = surveyed(tensors | layer("visual.blocks.0.q", None), tmp_path)
    found.require_loadable()
    with pytest.raises(CheckpointError, match=r"visual.blocks.0.q: is int8 without a label"):
        quantize_file(tmp_path / "in.safetensors", tmp_path / "o.safetensors", settings_from())


def test_old_fp8_layers_beside_the_model_keep_their_scales(tmp_path: Path) -> None:
    """A header with labels switches off ComfyUI's translation of the old names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    exact = {}
    for name in ("model.layers.0.q", "model.layers.1.q", "visual.blocks.0.q", "visual.blocks.1.q"):
        weight = torch.randn(32, 64, generator=generator) / 8
        scale = weight.abs().max() / 448
        tensors[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}.scale_weight"] = scale
        exact[name] = tensors[f"{name}.weight"].float() * scale
    save_file(tensors, tmp_path / "in.safetensors")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", settings_from())
    written = load_file(tmp_path / "out.safetensors")
    assert "scaled_fp8" not in written
    for name in ("visual.blocks.0.q", "visual.blocks.1.q"):
        value = written[f"{name}.weight"].float() * written[f"{name}.weight_scale"]
        assert torch.equal(value, exact[name])
        config = json.loads(bytes(written[f"{name}.comfy_quant"].tolist()))
        assert config == {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}


def test_fp8_stored_as_bytes_is_fp8(tmp_path: Path) -> None:
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    tensors = {
        "blocks.0.q.weight": codes.view(torch.uint8),
        "blocks.0.q.weight_scale": torch.tensor(0.5),
        "blocks.0.q.comfy_quant": label({"format": "float8_e4m3fn"}),
    }
    found = surveyed(tensors, tmp_path)
    (item,) = contents(found).layers
    assert torch.equal(to_float(item.load(found.checkpoint)), codes.float() * 0.5)


@pytest.mark.parametrize("part", ["pre_quant_scale", "smooth_scale", "svd_up", "weight_zero_point"])
def test_a_part_that_changes_the_weight_is_not_passed_over(part: str, tmp_path: Path) -> None:
    config = INT8 if part == "weight_zero_point" else None
    tensors = layer("blocks.0.q", config) | {f"blocks.0.q.{part}": torch.ones(64)}
    found = surveyed(tensors, tmp_path, "none")
    with pytest.raises(CheckpointError, match=rf"has {part}, which a weight of"):
        found.require_loadable()


@pytest.mark.parametrize("name", [["x"], {"a": 1}, 7], ids=["a list", "an object", "a number"])
def test_a_format_that_is_no_name_is_a_fault(name: object, tmp_path: Path) -> None:
    found = surveyed(layer("blocks.0.q", {"format": name}), tmp_path)
    with pytest.raises(CheckpointError, match="not a name"):
        found.require_loadable()


@pytest.mark.parametrize("format", ["float8_e4m3fn", "mxfp8"])
def test_a_matrix_without_sides_is_a_fault(format: str, tmp_path: Path) -> None:
    tensors = {
        "blocks.0.q.weight": torch.ones(()).to(torch.float8_e4m3fn),
        "blocks.0.q.weight_scale": torch.ones(()),
        "blocks.0.q.comfy_quant": label({"format": format}),
    }
    with pytest.raises(CheckpointError, match="expected a matrix"):
        surveyed(tensors, tmp_path).require_loadable()


def test_positions_and_leftover_scales_are_no_faults(tmp_path: Path) -> None:
    tensors = layer("blocks.0.q") | {
        "text_model.embeddings.position_ids": torch.arange(77)[None],
        "blocks.0.norm.weight": torch.ones(64, 64).bfloat16(),
        "blocks.0.norm.weight_scale": torch.ones(()),
    }
    found = surveyed(tensors, tmp_path)
    found.require_loadable()
    assert [(fault.layer, fault.fault) for fault in found.ignored] == [
        ("blocks.0.norm", "has a weight_scale although its weight is BF16")
    ]
    assert "blocks.0.norm.weight_scale" not in found.plain


def shards(folder: Path, parts: list[dict[str, torch.Tensor]], headers: list[object]) -> Path:
    """Shards named as diffusers names them; returns the index."""
    weight_map = {}
    for index, (tensors, header) in enumerate(zip(parts, headers, strict=True), 1):
        file = f"model-{index:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / file, {"_quantization_metadata": json.dumps(header)})
        weight_map |= dict.fromkeys(tensors, file)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_labels_of_every_shard_count(tmp_path: Path) -> None:
    four_bit = {"format": "convrot_w4a4", "convrot_groupsize": 64}
    parts = [
        {k: v[:, :32] if v.dtype == torch.int8 else v for k, v in layer(name, None).items()}
        for name in ("blocks.0.q", "blocks.1.q")
    ]
    parts = [{k: v.contiguous() for k, v in part.items()} for part in parts]
    headers = [{"layers": {f"blocks.{i}.q": four_bit}} for i in range(2)]
    found = survey(open_checkpoint(shards(tmp_path, parts, headers)), "none")
    assert {w.name: w.format for w in found.layers} == {
        "blocks.0.q": "convrot_w4a4",
        "blocks.1.q": "convrot_w4a4",
    }


def test_one_shard_stands_for_the_whole_model(tmp_path: Path) -> None:
    parts = [layer("blocks.0.q"), layer("blocks.1.q")]
    index = shards(tmp_path, parts, [{"layers": {}}, {"layers": {}}])
    shard = tmp_path / "model-00001-of-00002.safetensors"
    assert set(open_checkpoint(shard).entries) == set(open_checkpoint(index).entries)
    index.unlink()
    with pytest.raises(CheckpointError, match="is missing: it says which files belong"):
        open_checkpoint(shard)


@pytest.mark.parametrize("names", [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_a_lora_is_not_quantized(names: tuple[str, str], tmp_path: Path) -> None:
    tensors = {
        f"diffusion_model.blocks.{i}.q.{name}.weight": torch.ones(64, 64)
        for i in range(2)
        for name in names
    }
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="is a LoRA"):
        quantize_file(tmp_path / "in.safetensors", tmp_path / "o.safetensors", settings_from())


FLUX = {name: torch.ones(64, 4) for name in ("x_embedder.weight", "norm_out.linear.weight")} | {
    "time_text_embed.text_embedder.linear_1.weight": torch.ones(64, 4)
}


@pytest.mark.parametrize("kind", ["nvfp4", "widths", "scalars"])
def test_parts_that_cannot_be_stacked_are_named(kind: str, tmp_path: Path) -> None:
    tensors = dict(FLUX)
    for index, part in enumerate("qkv"):
        name = f"transformer_blocks.0.attn.to_{part}"
        if kind == "nvfp4":
            tensors[f"{name}.weight"] = torch.zeros(64, 32, dtype=torch.uint8)
            tensors[f"{name}.weight_scale"] = torch.ones(64, 4).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale_2"] = torch.ones(())
            tensors[f"{name}.comfy_quant"] = label({"format": "nvfp4"})
        elif kind == "widths":
            tensors[f"{name}.weight"] = torch.ones(64, 64 + index)
        else:
            tensors[f"{name}.scale"] = torch.ones(())
    with pytest.raises(CheckpointError, match=r"parts that (cannot be stacked|do not fit)"):
        contents(surveyed(tensors, tmp_path))


def test_the_inspection_is_the_same_every_time(tmp_path: Path) -> None:
    tensors = {k: v for i in range(12) for k, v in layer(f"blocks.{i}.q").items()}
    save_file(tensors, tmp_path / "in.safetensors")
    names = [entry["name"] for entry in inspect_file(tmp_path / "in.safetensors")["layers"]]
    assert names == sorted(names)
