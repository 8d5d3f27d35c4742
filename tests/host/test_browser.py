"""The nodes in ComfyUI's real frontend, in a real browser."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def page(comfyui: Path, tiny: Any, load_helper: Any, tmp_path_factory: Any) -> Iterator[Any]:
    """ComfyUI's page, its graph ready, on a server that holds a tiny Flux model."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("comfyui_frontend_package", reason="no ComfyUI frontend installed")
    import comfy.sd

    folder = tmp_path_factory.mktemp("comfyui")
    server = load_helper("server").Server(comfyui, folder)
    with torch.inference_mode():
        path = folder / "models/diffusion_models/tiny_flux.safetensors"
        comfy.sd.save_checkpoint(
            str(path), tiny.build("flux", torch.bfloat16), metadata={"format": "pt"}
        )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.goto(server.address)
        page.wait_for_function(
            "() => window.app?.graph && window.LiteGraph?.registered_node_types?.LeanDiTQuantizeModel",
            timeout=60_000,
        )
        yield page
        browser.close()
    server.stop()


def screenshot(page: Any, name: str) -> None:
    """Kept where SCREENSHOTS names a folder, to be looked at."""
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "example_workflows").glob("*.json")), ids=lambda p: p.stem
)
def test_an_example_workflow_becomes_its_api_twin(page: Any, path: Path) -> None:
    workflow = json.loads(path.read_text(encoding="utf-8"))
    twin = json.loads((path.parent / "api" / path.name).read_text(encoding="utf-8"))
    page.evaluate("(workflow) => window.app.loadGraphData(workflow)", workflow)
    prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    screenshot(page, path.stem)
    found = {
        key: {"class_type": node["class_type"], "inputs": node["inputs"]}
        for key, node in prompt.items()
    }
    assert found == twin


@pytest.mark.parametrize("renderer", ["classic", "Nodes 2.0"])
def test_the_report_appears_in_the_node_and_not_in_the_workflow(page: Any, renderer: str) -> None:
    page.evaluate(
        "(on) => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)",
        renderer == "Nodes 2.0",
    )
    prompt = {
        "1": {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": "tiny_flux.safetensors", "weight_dtype": "default"},
        },
        "2": {
            "class_type": "LeanDiTQuantizeModel",
            "inputs": {
                "model": ["1", 0],
                "format": "w4a8_convrot",
                "group_size": "64" if renderer == "classic" else "16",
                "preset": "auto",
                "include": "*img_mod*",
                "exclude": "",
                "loras": "bake",
                "device": "auto",
                "enabled": True,
            },
        },
        "3": {"class_type": "PreviewAny", "inputs": {"source": ["2", 1]}},
    }
    page.evaluate("(prompt) => window.app.loadApiJson(prompt, 'test')", prompt)
    page.evaluate("() => window.app.queuePrompt(0)")
    page.wait_for_function(
        """() => window.app.graph.nodes.some((node) =>
            node.widgets?.some((w) => w.name === 'leandit_report' && w.value))""",
        timeout=60_000,
    )
    text = page.evaluate(
        """() => window.app.graph.nodes.flatMap((node) => node.widgets ?? [])
            .find((w) => w.name === 'leandit_report').value"""
    )
    page.evaluate("() => window.app.canvas.ds.reset()")
    page.wait_for_timeout(300)
    screenshot(page, f"report-{renderer}")
    assert "quantized 22 of 36 layers to w4a8_convrot" in text
    area = page.get_by_label("LeanDiT report").last
    assert area.input_value() == text
    assert area.is_visible()
    assert area.get_attribute("readonly") is not None
    saved = page.evaluate("() => JSON.stringify(window.app.graph.serialize())")
    assert "quantized 22 of 36" not in saved
    again = page.evaluate("async () => (await window.app.graphToPrompt()).output")
    inputs = next(n["inputs"] for n in again.values() if n["class_type"] == "LeanDiTQuantizeModel")
    assert set(inputs) == set(prompt["2"]["inputs"]) | {"cache"}  # the prompt is of before it


def test_a_failed_run_shows_the_error_in_place_of_the_old_report(page: Any) -> None:
    page.evaluate(
        """() => {
            const node = window.app.graph.nodes.find((n) => n.type === 'LeanDiTQuantizeModel');
            node.widgets.find((w) => w.name === 'exclude').value = '*';
            return window.app.queuePrompt(0);
        }"""
    )
    page.wait_for_function(
        """() => window.app.graph.nodes.some((node) =>
            node.widgets?.some((w) => w.name === 'leandit_report' && w.value.startsWith('failed:')))""",
        timeout=60_000,
    )
    text = page.evaluate(
        """() => window.app.graph.nodes.flatMap((node) => node.widgets ?? [])
            .find((w) => w.name === 'leandit_report').value"""
    )
    assert "no layer is selected" in text


def test_the_help_page_is_served_where_the_frontend_looks_for_it(page: Any) -> None:
    origin = page.evaluate("() => window.location.origin")
    reply = page.request.get(f"{origin}/extensions/ComfyUI-LeanDiT/docs/LeanDiTQuantizeModel.md")
    assert reply.ok
    assert reply.text().startswith("# Quantize Model")
