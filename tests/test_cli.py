"""The command line, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from leandit import cli, doctor
from PIL import Image
from safetensors import safe_open

FORMATS = ["int8_convrot", "int8", "w4a8_convrot", "w4a4_convrot"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leandit", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("demo")
    done = run("demo", "--out", "out", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "words.txt").write_text(done.stderr)
    return json.loads(done.stdout), folder / "out"


def test_the_demo_prints_its_report_as_json_and_writes_the_same(demo: tuple[dict, Path]) -> None:
    data, out = demo
    assert json.loads((out / "report.json").read_text()) == data
    assert set(data) == {"source", "formats"}
    assert [row["format"] for row in data["formats"]] == FORMATS
    assert set(data["formats"][0]) == {
        "format",
        "layers_quantized",
        "layers_kept",
        "bytes_before",
        "bytes_after",
        "worst_sqnr_db",
        "psnr_db",
        "seconds_per_step",
        "digits_read",
    }


def test_the_demo_shows_that_8_bit_keeps_the_digits_and_4_bit_activations_cost(
    demo: tuple[dict, Path],
) -> None:
    data, _ = demo
    source, rows = data["source"], {row["format"]: row for row in data["formats"]}
    assert source["digits"] == 100
    assert source["digits_read"] >= 93
    assert rows["int8_convrot"]["digits_read"] >= source["digits_read"] - 2
    assert rows["w4a8_convrot"]["digits_read"] >= source["digits_read"] - 6
    psnr = {name: row["psnr_db"] for name, row in rows.items()}
    assert psnr["int8_convrot"] > psnr["w4a8_convrot"] > psnr["w4a4_convrot"]
    assert psnr["int8_convrot"] > 30
    for row in rows.values():
        assert row["bytes_after"] < row["bytes_before"] == source["bytes"]
        assert row["layers_quantized"] > 0


def test_the_demo_draws_a_row_of_ten_pictures_per_format(demo: tuple[dict, Path]) -> None:
    _, out = demo
    with Image.open(out / "grid.png") as grid:
        width, height = grid.size
        dark = sum(value < 128 for value in grid.convert("L").tobytes())
    assert width > 10 * 56
    assert height > 5 * 56
    assert dark > 0.02 * width * height


@pytest.mark.parametrize("name", FORMATS)
def test_the_demo_writes_a_native_file(demo: tuple[dict, Path], name: str) -> None:
    data, out = demo
    row = next(row for row in data["formats"] if row["format"] == name)
    with safe_open(out / f"digits_{name}.safetensors", "pt") as file:
        keys = list(file.keys())
        header = json.loads(file.metadata()["_quantization_metadata"])
        marked = [key for key in keys if key.endswith(".comfy_quant")]
        config = json.loads(file.get_tensor(marked[0]).numpy().tobytes())
    assert len(marked) == len(header["layers"]) == row["layers_quantized"]
    assert header["layers"][marked[0].removesuffix(".comfy_quant")] == config


def test_the_demo_says_what_it_made_in_words(demo: tuple[dict, Path]) -> None:
    """With --json on the other stream, the same words."""
    _, out = demo
    words = (out.parent / "words.txt").read_text()
    for word in (*FORMATS, "grid.png", "report.json", "read right", "bf16 (source)", " dB"):
        assert word in words


def test_the_doctor_prints_one_json_object_and_as_text_one_line_each(tmp_path: Path) -> None:
    done = run("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 0
    findings = json.loads(done.stdout)["findings"]
    assert {"subject", "ok", "text", "remedy"} == set(findings[0])
    lines = run("doctor", cwd=tmp_path).stdout.splitlines()
    assert len(lines) == len(findings)
    for line, finding in zip(lines, findings, strict=True):
        assert line.startswith("ok" if finding["ok"] else "--")
        assert finding["text"] in line


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["demo", "--what"], []],
    ids=["unknown command", "unknown option", "no command"],
)
def test_a_wrong_call_ends_with_2_and_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "usage: leandit" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_ends_with_2_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("demo", "--out", str(tmp_path / "file" / "out"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.replace("\n", " ").startswith("leandit: cannot write into")
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_with_130_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "leandit: interrupted\n"


def test_a_fault_of_ours_ends_with_1_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(doctor, "examine", broken)
    assert cli.main(["doctor"]) == 1
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_quantize_writes_a_file_and_prints_its_json(tmp_path: Path) -> None:
    from leandit.demo.run import MODEL_FILE

    done = run(
        "quantize", str(MODEL_FILE), "out.safetensors", "--exclude", "*txt*", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["layers_quantized"] == 16
    excluded = [layer for layer in data["layers_kept"] if "excluded" in layer["reason"]]
    assert {"name": "double_blocks.0.txt_attn.qkv", "reason": "excluded by '*txt*'"} in excluded
    assert 0 < data["bytes_after"] < data["bytes_before"]
    assert data["peak_rss_bytes"] is None or data["peak_rss_bytes"] > 10**7
    assert (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.safetensors", "out.safetensors"], "does not exist"),
        (["text.safetensors", "out.safetensors"], "not a safetensors file"),
        (["text.safetensors", "text.safetensors"], "exists already"),
        (["text.safetensors", "o", "--include", "re:("], "not a valid regular expression"),
    ],
    ids=["missing file", "not a safetensors file", "existing target", "malformed pattern"],
)
def test_quantize_refuses_in_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("this is a text and no safetensors file")
    done = run("quantize", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
