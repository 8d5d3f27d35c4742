"""The checkout as a package: importable under any folder name, and importing only defines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LOAD_AS_COMFYUI_DOES = """
import importlib.util, json, sys
path = sys.argv[1]
spec = importlib.util.spec_from_file_location(
    path.replace(".", "_x_"), path + "/__init__.py", submodule_search_locations=[path]
)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
import torch
print(json.dumps({
    "nodes": sorted(module.NODE_CLASS_MAPPINGS),
    "names": sorted(module.NODE_DISPLAY_NAME_MAPPINGS),
    "web": module.WEB_DIRECTORY,
    "cuda_initialised": torch.cuda.is_initialized(),
    "comfy": "comfy" in sys.modules,
    "kitchen": "comfy_kitchen" in sys.modules,
}))
"""


def copy_checkout(target: Path) -> None:
    ignored = shutil.ignore_patterns(".git", "__pycache__", "*.egg-info", ".venv", "*.safetensors")
    shutil.copytree(ROOT, target, ignore=ignored)


@pytest.mark.parametrize("folder", ["ComfyUI-LeanDiT", "renamed_pack", "with space", "v1.2"])
def test_comfyui_loads_the_pack_from_a_folder_called(folder: str, tmp_path: Path) -> None:
    copy_checkout(tmp_path / folder)
    run = subprocess.run(
        [sys.executable, "-c", LOAD_AS_COMFYUI_DOES, str(tmp_path / folder)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    seen = json.loads(run.stdout)
    assert seen == {
        "nodes": [
            "LeanDiTAttention",
            "LeanDiTLayerwiseOffload",
            "LeanDiTLoadModel",
            "LeanDiTQuantizeModel",
            "LeanDiTRowSplitLinear",
            "LeanDiTSaveModel",
        ],
        "names": [
            "LeanDiTAttention",
            "LeanDiTLayerwiseOffload",
            "LeanDiTLoadModel",
            "LeanDiTQuantizeModel",
            "LeanDiTRowSplitLinear",
            "LeanDiTSaveModel",
        ],
        "web": "./web",
        "cuda_initialised": False,
        "comfy": False,
        "kitchen": False,
    }


@pytest.mark.parametrize("folder", ["ComfyUI-LeanDiT", "renamed_pack"])
def test_pytest_collects_a_copy_called(folder: str, tmp_path: Path) -> None:
    copy_checkout(tmp_path / folder)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/kernels/test_hadamard.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path / folder,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
