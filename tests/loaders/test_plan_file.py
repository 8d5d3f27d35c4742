"""`leandit plan`: from a file's header alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from leandit.cli import main
from leandit.demo.run import MODEL_FILE
from leandit.loaders.convert import quantize_file
from leandit.loaders.errors import CheckpointError
from leandit.loaders.model_blocks import read_model_file
from leandit.loaders.plan_file import plan_file
from leandit.loaders.reader import open_checkpoint
from leandit.quant.errors import SettingsError
from leandit.quant.settings import settings_from

BLOCKS, WIDTH = 80, 4096


def header_only(path: Path, blocks: int = BLOCKS) -> Path:
    """A file of 15 billion weights that takes no room on the disk: its data is a hole."""
    shapes = {"embed_tokens.weight": (32_000, WIDTH)}
    for index in range(blocks):
        shapes[f"blocks.{index}.attn.qkv.weight"] = (3 * WIDTH, WIDTH)
        shapes[f"blocks.{index}.attn.qkv.bias"] = (3 * WIDTH,)
        shapes[f"blocks.{index}.mlp.up.weight"] = (16_384, WIDTH)
        shapes[f"blocks.{index}.mlp.down.weight"] = (WIDTH, 16_384)
    header, position = {}, 0
    for name, shape in shapes.items():
        nbytes = 2
        for side in shape:
            nbytes *= side
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return path


def test_a_large_models_plans_follow_from_its_header(tmp_path: Path) -> None:
    data = plan_file(header_only(tmp_path / "m.safetensors"), "4090", None, None, 4608)
    inside = BLOCKS * (3 * WIDTH * WIDTH + 2 * 16_384 * WIDTH)
    assert data["file"]["blocks"] == BLOCKS
    assert data["file"]["parameters_in_blocks"] == inside
    assert data["file"]["bytes"] == 2 * (inside + 32_000 * WIDTH + BLOCKS * 3 * WIDTH)
    plans = {plan["format"]: plan for plan in data["plans"]}
    assert set(plans) == {"as stored", "int8_convrot", "w4a8_convrot"}
    sizes = [plan["weights_bytes"] for plan in plans.values()]
    assert sizes == sorted(sizes, reverse=True)
    stored, int8, int4 = plans.values()
    assert stored["resident_blocks"] < int8["resident_blocks"] == int4["resident_blocks"] == BLOCKS
    assert int8["streamed_bytes_per_step"] == 0 and int8["hidden"]
    assert stored["step_seconds"] >= stored["compute_seconds"] > int8["compute_seconds"]
    assert all(plan["fits"] for plan in plans.values())


@pytest.mark.parametrize("format", ["int8_convrot", "w4a8_convrot", "w4a4_convrot"])
def test_the_sizes_are_those_that_quantizing_gives(format: str, tmp_path: Path) -> None:
    done = quantize_file(MODEL_FILE, tmp_path / "out.safetensors", settings_from(format))
    forecast = read_model_file(MODEL_FILE).blocks(settings_from(format))
    labels = sum(
        entry.nbytes
        for name, entry in open_checkpoint(tmp_path / "out.safetensors").entries.items()
        if name.endswith(".comfy_quant")
    )
    assert sum(forecast.blocks) + forecast.outside == done.bytes_after - labels
    again = read_model_file(tmp_path / "out.safetensors").blocks(None)
    assert sum(again.blocks) + again.outside == done.bytes_after


def test_too_small_a_card_and_too_little_memory_are_said(tmp_path: Path) -> None:
    path = header_only(tmp_path / "m.safetensors")
    small = plan_file(path, "4060", 2, None, 4608)
    assert not any(plan["fits"] for plan in small["plans"])
    assert "do not fit" in small["plans"][0]["why"] or "not even two" in small["plans"][0]["why"]
    poor = plan_file(path, "4060", None, 8, 4608)["plans"][0]
    assert not poor["fits"] and "of main memory for the weights, there are 8.0" in poor["why"]


@pytest.mark.parametrize(
    ("card", "vram", "ram", "tokens", "words"),
    [
        ("voodoo", None, None, 10, "unknown card 'voodoo'; valid: 4090"),
        ("4090", 0, None, 10, "vram must be above 0"),
        ("4090", None, -1, 10, "ram must be above 0"),
        ("4090", None, None, 0, "tokens must be above 0"),
    ],
)
def test_nonsense_is_refused_in_words(card, vram, ram, tokens, words) -> None:
    with pytest.raises(SettingsError, match=words):
        plan_file(MODEL_FILE, card, vram, ram, tokens)


def test_a_file_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no repeated blocks"):
        read_model_file(header_only(tmp_path / "m.safetensors", blocks=0))


def test_the_command_prints_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(header_only(tmp_path / "m.safetensors"))
    assert main(["plan", path, "--vram", "12", "--ram", "64", "--tokens", "4096"]) == 0
    text = capsys.readouterr().out
    assert "Speeds are assumed, not measured" in text and "int8_convrot" in text
    assert main(["plan", path, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"file", "machine", "plans", "notes"}
    keys = {"format", "weights_bytes", "resident_blocks", "streamed_bytes_per_step", "why"}
    assert keys | {"step_seconds", "hidden", "fits"} <= set(data["plans"][0])


def test_a_model_too_small_to_take_time_has_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MODEL_FILE), "--tokens", "1"]) == 0
    text = capsys.readouterr().out
    assert "4.7 MB" in text
    assert "everything stays on the card" in text
    assert "Speeds are assumed, not measured: 27 GB/s from pinned memory" in text


def test_what_does_not_fit_has_no_figures_but_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(header_only(tmp_path / "m.safetensors"))
    assert main(["plan", path, "--vram", "12", "--ram", "8"]) == 0
    line = next(row for row in capsys.readouterr().out.splitlines() if "as stored" in row)
    assert "does not fit" in line
    assert "GiB of main memory for the weights, there are 8.0" in line
    assert " of 80" not in line


def test_a_file_that_is_quantized_says_what_is_left_out(tmp_path: Path) -> None:
    quantize_file(MODEL_FILE, tmp_path / "q.safetensors", settings_from("int8_convrot"))
    data = plan_file(tmp_path / "q.safetensors", "4090", None, None, 100)
    assert [plan["format"] for plan in data["plans"]] == ["as stored"]
    assert data["notes"] == [
        f"{name}: nothing of the file is left to quantize"
        for name in ("int8_convrot", "w4a8_convrot")
    ]


def test_a_gguf_file_is_told_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match="is a GGUF file, not safetensors"):
        plan_file(tmp_path / "m.gguf", "4090", None, None, 100)
