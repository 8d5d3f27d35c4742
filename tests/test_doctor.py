"""The doctor: one finding a line, with the reason and the remedy."""

from __future__ import annotations

import json

import pytest
import torch
from leandit import doctor


def by_subject() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_it_looks_at_everything_that_matters() -> None:
    subjects = {"python", "torch", "gpu", "comfy-kitchen", "triton", "sageattention", "flash_attn"}
    assert subjects | {"ComfyUI"} <= set(by_subject())


def test_without_a_gpu_it_says_so_and_names_the_backend_that_runs() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = by_subject()
    assert not found["gpu"].ok
    assert "eager" in found["comfy-kitchen"].text
    assert not found["comfy-kitchen cuda"].ok


def test_a_torch_for_cuda_12_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    finding = by_subject()["torch"]
    assert not finding.ok
    assert "built for CUDA 12.8" in finding.text
    assert "CUDA 13" in finding.remedy


def test_a_missing_package_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_gpu", lambda: doctor.Finding("gpu", True, "a card"))
    found = by_subject()
    assert found["sageattention"].remedy == "pip install sageattention"
    assert found["comfy-kitchen"].remedy == "pip install comfy-kitchen"
    assert found["int8 linear"].text.startswith("Row-Split Linear runs reference")


def test_comfyui_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy/model_patcher.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    assert by_subject()["ComfyUI"].text == f"found at {tmp_path}"


def test_a_comfyui_path_that_leads_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", "/no/such/folder")
    found = by_subject()["ComfyUI"]
    assert not found.ok
    assert found.text == "not found at /no/such/folder"


def test_the_json_is_plain_data() -> None:
    data = doctor.as_json(doctor.examine())
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data["findings"][0]) == {"subject", "ok", "text", "remedy"}
