"""Host tests run on a real ComfyUI, on its CPU path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from late_device import LateDevice
from leandit.quant.offload_settings import offload_settings_from

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


@pytest.fixture
def late() -> Iterator[None]:
    """Every streaming device made in the test must have given everything back."""
    LateDevice.made.clear()
    yield
    for device in LateDevice.made:
        assert not device.alive
        assert not device.waiting


@pytest.fixture
def offload(comfyui: Path, late: None) -> Callable[..., Any]:
    """The node's function with that device; mode on, one resident block, unless told otherwise."""
    from leandit.host.offload import layerwise_offload

    def function(model: Any, device: Any = LateDevice, **settings: Any) -> Any:
        chosen = offload_settings_from(**{"mode": "on", "resident": "1", **settings})
        return layerwise_offload(model, chosen, None, lambda _: device)[0]

    return function


@pytest.fixture
def held(comfyui: Path) -> Callable[..., Any]:
    """A clone with the same blocks on the card for the time of a run, and no streaming."""
    from comfy.patcher_extension import WrappersMP
    from leandit.host.block_weights import block_names
    from leandit.host.residency import hold_blocks, restore_order

    def function(model: Any, resident: int = 1) -> Any:
        def sample(executor: Any, guider: Any, *args: Any) -> Any:
            patcher = guider.model_patcher
            hold_blocks(patcher, block_names(patcher), resident, 2, 1 << 40)
            try:
                return executor(guider, *args)
            finally:
                restore_order(patcher)

        clone = model.clone()
        clone.add_wrapper(WrappersMP.SAMPLER_SAMPLE, sample)
        return clone

    return function


@pytest.fixture
def budget(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float | None], None]:
    """Sets the bytes of weights that ComfyUI may load; None: all."""
    import comfy.model_management

    limit: list[float | None] = [None]
    load = comfy.model_management.LoadedModel.model_load

    def model_load(self: Any, lowvram_model_memory: float = 0, **kwargs: Any) -> Any:
        if limit[0] is not None:
            lowvram_model_memory = limit[0] - self.model_loaded_memory() or 0.1
        return load(self, lowvram_model_memory, **kwargs)

    monkeypatch.setattr(comfy.model_management.LoadedModel, "model_load", model_load)

    def set_limit(value: float | None) -> None:
        comfy.model_management.unload_all_models()
        limit[0] = value

    return set_limit


@pytest.fixture
def spare(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have ComfyUI see a card with so many bytes beside the weights and what one step needs."""
    import comfy.model_management

    def set_spare(count: int) -> None:
        free = comfy.model_management.minimum_inference_memory() + count
        monkeypatch.setattr(
            comfy.model_management,
            "get_free_memory",
            lambda device=None, torch_free_too=False: (free, free) if torch_free_too else free,
        )

    return set_spare


@pytest.fixture
def nearly_full(spare: Callable[[int], None]) -> None:
    """Have ComfyUI see a card with just what one step needs beside the weights."""
    spare(0)
