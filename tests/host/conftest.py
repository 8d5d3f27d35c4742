"""Host tests run on a real ComfyUI, on its CPU path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent


def load(name: str) -> ModuleType:
    """A helper module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"host_{name}", HERE / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


finder = load("find_comfyui")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = None if finder.find_comfyui() else pytest.mark.skip(reason=finder.MISSING)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.host)
            if skip is not None:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The ComfyUI folder, importable and set to the CPU."""
    folder = finder.find_comfyui()
    if folder is None:
        pytest.skip(finder.MISSING)
    sys.path.insert(0, str(folder))
    from comfy.cli_args import args

    args.cpu = True
    return folder


@pytest.fixture
def inference(comfyui: Path) -> Iterator[None]:
    """ComfyUI runs every node in inference mode."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def load_helper() -> Any:
    """Imports a helper module of this folder by name."""
    return load


@pytest.fixture(scope="session")
def tiny(comfyui: Path) -> Any:
    """The tiny models."""
    return load("tiny_models")
