"""What `inspect` says of each format, and the exact sentences of refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from format_cases import CASES, write_case
from leandit.cli import main
from leandit.loaders.errors import CheckpointError
from leandit.loaders.inspect import group_layers, inspect_file
from leandit.loaders.reader import open_checkpoint
from leandit.loaders.survey import survey
from safetensors.torch import load_file, save_file

WEIGHT = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) / 16
WEIGHT[:, ::37] *= 3
LAYER = "blocks.0.q"


def example(name: str, folder: Path) -> Path:
    return write_case(name, folder, {LAYER: WEIGHT}, {f"{LAYER}.bias": torch.ones(64)})[0]


@pytest.mark.parametrize("name", list(CASES))
def test_names_writer_format_and_what_becomes_of_it(name: str, tmp_path: Path) -> None:
    data = inspect_file(example(name, tmp_path))
    assert data["loads"] and not data["faults"] and data["writer"]
    (layer,) = data["layers"]
    assert layer["shape"] == [64, 256]
    assert layer["loads_as"].startswith(CASES[name].loads_as)
    assert layer["stock"]
    assert sum(data["formats"].values()) == 1
    assert sum(row["layers"] for row in group_layers(data)) == 1


def test_an_older_comfyui_is_named(tmp_path: Path) -> None:
    data = inspect_file(example("asym_w4a8_int8", tmp_path), comfyui=(0, 30, 1))
    assert data["layers"][0]["stock"] == "needs ComfyUI 0.31.0, this is 0.30.1"


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = example("bitsandbytes nf4", tmp_path)
    assert main(["inspect", str(path)]) == 0
    assert "bitsandbytes; no fault found" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["formats"] == {"bnb_nf4": 1}
    assert main(["inspect", str(tmp_path / "absent.safetensors")]) == 2


def label(config: object) -> torch.Tensor:
    text = config if isinstance(config, str) else json.dumps(config)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


INT8 = torch.ones(64, 256, dtype=torch.int8)
Tensors = dict[str, torch.Tensor]
REFUSED: dict[str, tuple[Callable[[], Tensors], str]] = {
    "int8 alone": (lambda: {"weight": INT8}, "is of no known format"),
    "uint8 alone": (lambda: {"weight": INT8.view(torch.uint8)}, "is of no known format"),
    "fp8 with an unknown scale": (
        lambda: {"weight": INT8.float().to(torch.float8_e4m3fn), "scale": torch.ones(64, 1)},
        "is of no known format",
    ),
    "an unknown format": (
        lambda: {"weight": INT8, "comfy_quant": label({"format": "int3_magic"})},
        "a format this package does not know ('int3_magic')",
    ),
    "SVDQuant": (
        lambda: {"weight": INT8, "comfy_quant": label({"format": "svdquant_w4a4"})},
        "is SVDQuant (Nunchaku)",
    ),
    "Nunchaku": (
        lambda: {"qweight": INT8, "wscales": torch.ones(4, 64)},
        "is Nunchaku or AWQ (qweight)",
    ),
    "GPTQ": (lambda: {"qweight": INT8.int(), "scales": torch.ones(4, 64)}, "is GPTQ or AWQ"),
    "a scale of the wrong shape": (
        lambda: {
            "weight": INT8,
            "weight_scale": torch.ones(256),
            "comfy_quant": label({"format": "int8_tensorwise"}),
        },
        "its weight_scale has the shape [256], expected [64, 1] or [64] or [] or [1] or [1, 1]",
    ),
    "no scale": (
        lambda: {"weight": INT8, "comfy_quant": label({"format": "int8_tensorwise"})},
        "has no weight_scale (it has comfy_quant, weight)",
    ),
    "a rotation that does not fit": (
        lambda: {
            "weight": torch.ones(64, 200, dtype=torch.int8),
            "weight_scale": torch.ones(64, 1),
            "comfy_quant": label({"format": "int8_tensorwise", "convrot": True}),
        },
        "its rotation group 256 does not divide its width K=200",
    ),
    "a label that is no JSON": (
        lambda: {"weight": INT8, "weight_scale": torch.ones(64, 1), "comfy_quant": label("{oops")},
        "its comfy_quant is not JSON",
    ),
    "NF4 with bytes missing": (
        lambda: {
            "weight": torch.zeros(100, 1, dtype=torch.uint8),
            "weight.absmax": torch.ones(4),
            "weight.quant_map": torch.ones(16),
            "weight.quant_state.bitsandbytes__nf4": label({"blocksize": 64, "shape": [64, 256]}),
        },
        "its weight has 100 bytes; the shape [64, 256] needs 8192",
    ),
    "packed SDNQ without its config": (
        lambda: {"weight": torch.zeros(8192, dtype=torch.uint8), "scale": torch.ones(64, 1)},
        "stands only in its quantization_config.json",
    ),
    "unlabelled int8 of equal columns": (
        lambda: {
            "weight": torch.randint(-90, 90, (64, 256), dtype=torch.int8),
            "weight_scale": torch.ones(64, 1),
        },
        "its numbers do not tell whether it is rotated",
    ),
    "a stray integer matrix": (lambda: {"table": INT8}, "of no known format"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_is_refused_in_words(name: str, tmp_path: Path) -> None:
    build, words = REFUSED[name]
    tensors = {f"{LAYER}.{part}": value for part, value in build().items()}
    save_file({**tensors, "norm.weight": torch.ones(4)}, tmp_path / "bad.safetensors")
    data = inspect_file(tmp_path / "bad.safetensors")
    assert not data["loads"]
    (fault,) = data["faults"]
    assert words in fault["fault"]
    assert fault["remedy"]
    with pytest.raises(CheckpointError) as caught:
        survey(open_checkpoint(tmp_path / "bad.safetensors")).require_loadable()
    assert str(tmp_path) in str(caught.value) and words in str(caught.value)


def test_a_header_that_names_layers_that_are_not_there_is_reported(tmp_path: Path) -> None:
    path = example("int8_tensorwise with scale [N,1]", tmp_path)
    layers = {"blocks.9.q": {"format": "int8_tensorwise"}}
    header = {"_quantization_metadata": json.dumps({"layers": layers})}
    save_file(load_file(path), path, header)
    data = inspect_file(path)
    assert data["loads"]
    (fault,) = data["faults"]
    assert fault["layer"] == "blocks.9.q" and fault["ignored"]


def test_a_pytorch_file_is_named_as_one(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is a PyTorch file \(.pt, .ckpt\)"):
        inspect_file(tmp_path / "model.safetensors")
