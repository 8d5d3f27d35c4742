"""API prompts posted to a real ComfyUI server."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import write_case
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server(comfyui: Path, tiny: Any, load_helper: Any, tmp_path_factory: Any) -> Iterator[Any]:
    import comfy.sd

    folder = tmp_path_factory.mktemp("comfyui")
    running = load_helper("server").Server(comfyui, folder)
    with torch.inference_mode():
        model = tiny.build("flux", torch.bfloat16)
        path = folder / "models/diffusion_models/tiny_flux.safetensors"
        comfy.sd.save_checkpoint(str(path), model, metadata={"format": "pt"})
    yield running
    running.stop()


QUANTIZE = {
    "model": ["1", 0],
    "format": "int8_convrot",
    "group_size": "auto",
    "preset": "auto",
    "include": "",
    "exclude": "",
    "loras": "bake",
    "device": "auto",
    "enabled": True,
}


def prompt(**changes: Any) -> dict[str, Any]:
    """Load, quantize, sample one step, save the latent and show the report."""
    conditioning = {"tokens": 4, "width": 64, "pooled": 32, "seed": 0}
    sampler = {
        "model": ["2", 0],
        "positive": ["3", 0],
        "negative": ["3", 0],
        "latent_image": ["4", 0],
        "seed": 1,
        "steps": 2,
        "cfg": 1.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
    }
    nodes = {
        "1": ("UNETLoader", {"unet_name": "tiny_flux.safetensors", "weight_dtype": "default"}),
        "2": ("LeanDiTQuantizeModel", QUANTIZE | changes),
        "3": ("FixtureConditioning", conditioning),
        "4": ("EmptySD3LatentImage", {"width": 64, "height": 64, "batch_size": 1}),
        "5": ("KSampler", sampler),
        "6": ("SaveLatent", {"samples": ["5", 0], "filename_prefix": "run"}),
        "7": ("PreviewAny", {"source": ["2", 1]}),
    }
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def saved_latent(server: Any, history: dict[str, Any], node: str = "6") -> torch.Tensor:
    (entry,) = history["outputs"][node]["latents"]
    path = server.folder / "output" / entry["subfolder"] / entry["filename"]
    return load_file(path)["latent_tensor"]


@pytest.mark.parametrize("format", ["int8_convrot", "int8", "w4a8_convrot", "w4a4_convrot"])
def test_a_prompt_with_the_node_succeeds_and_its_history_holds_the_report(
    server: Any, format: str
) -> None:
    history = server.run(prompt(format=format))
    assert history["status"]["status_str"] == "success"
    (report,) = history["outputs"]["2"]["leandit"]
    assert report["node"] == "LeanDiTQuantizeModel"
    assert report["summary"]["format"] == format
    assert report["summary"]["family"] == "flux"
    assert report["summary"]["layers_quantized"] == 20
    assert report["summary"]["layers_kept"] == 16
    assert report["summary"]["bytes_after"] < 0.7 * report["summary"]["bytes_before"]
    assert len(report["layers"]) == 36
    (text,) = history["outputs"]["2"]["text"]
    assert f"quantized 20 of 36 layers to {format}" in text
    assert history["outputs"]["7"]["text"] == (text,) or history["outputs"]["7"]["text"] == [text]
    assert saved_latent(server, history).isfinite().all()


def without_large_files(example: dict[str, Any], saved_as: str) -> None:
    """Text encoders and VAE are too large for a test; a fixture and the latent stand in for them."""
    conditioning = {"tokens": 4, "width": 64, "pooled": 32, "seed": 0}
    example["4"] = {"class_type": "FixtureConditioning", "inputs": conditioning}
    example["7"]["inputs"] |= {"width": 64, "height": 64}
    example["8"]["inputs"]["steps"] = 2
    saved = {"samples": ["8", 0], "filename_prefix": saved_as}
    example["11"] = {"class_type": "SaveLatent", "inputs": saved}
    for unused in ("3", "9", "10"):
        del example[unused]


def test_the_example_for_flux_runs_with_a_tiny_flux_in_place_of_its_files(server: Any) -> None:
    path = ROOT / "example_workflows/api/quantize_flux.json"
    example = json.loads(path.read_text(encoding="utf-8"))
    example["1"]["inputs"]["unet_name"] = "tiny_flux.safetensors"
    without_large_files(example, "example")
    history = server.run(example)
    assert history["status"]["status_str"] == "success"
    assert history["outputs"]["2"]["leandit"][0]["summary"]["layers_quantized"] == 20


def test_the_example_for_loading_runs_with_a_tiny_nf4_flux(server: Any, tiny: Any) -> None:
    """The file is written as bitsandbytes would; stand-ins as in the example above."""
    tensors = load_file(server.folder / "models/diffusion_models/tiny_flux.safetensors")
    prefix = "model.diffusion_model."
    tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    layers = {
        name.removesuffix(".weight"): tensors.pop(name).float()
        for name in list(tensors)
        if "blocks." in name and name.endswith("0.weight") and tensors[name].ndim == 2
    }
    folder = server.folder / "models/diffusion_models"
    path, _ = write_case("bitsandbytes nf4", folder, layers, tensors)
    example = json.loads(
        (ROOT / "example_workflows/api/load_quantized_flux.json").read_text("utf-8")
    )
    example["2"]["inputs"]["model_name"] = path.name
    without_large_files(example, "loaded")
    history = server.run(example)
    assert history["status"]["status_str"] == "success"
    (report,) = history["outputs"]["2"]["leandit"]
    assert report["node"] == "LeanDiTLoadModel"
    assert report["summary"]["formats"] == {"bnb_nf4": len(layers)}
    assert report["summary"]["loads_as"] == {"stored (NF4 codebook)": len(layers)}


def test_the_example_for_saving_writes_a_file_that_comfyui_loads_without_the_package(
    server: Any, tiny: Any
) -> None:
    import comfy.sd

    example = json.loads(
        (ROOT / "example_workflows/api/save_quantized_flux.json").read_text("utf-8")
    )
    example["1"]["inputs"]["unet_name"] = "tiny_flux.safetensors"
    history = server.run(example)
    assert history["status"]["status_str"] == "success"
    (report,) = history["outputs"]["3"]["leandit"]
    written = Path(report["summary"]["file"])
    assert written.parent == server.folder / "output/diffusion_models"
    assert report["summary"]["layers_quantized"] == 20
    latents = []
    for path in (written, server.folder / "models/diffusion_models/tiny_flux.safetensors"):
        with torch.inference_mode():
            latents.append(tiny.sample(comfy.sd.load_diffusion_model(str(path)), "flux"))
    assert (latents[0] - latents[1]).norm() < 0.03 * latents[1].norm()
    assert not torch.equal(latents[0], latents[1])
    again = server.run(example | {"9": {"class_type": "PreviewAny", "inputs": {"source": "x"}}})
    assert again["status"]["status_str"] == "success"  # ComfyUI's cache: nothing runs anew
    example["3"]["inputs"]["filename_prefix"] += "-other"
    example["3"]["inputs"]["overwrite"] = True
    assert server.run(example)["status"]["status_str"] == "success"
    assert (written.parent / f"{written.stem}-other.safetensors").exists()


def test_the_example_for_row_splitting_runs_with_a_tiny_flux(server: Any) -> None:
    example = json.loads((ROOT / "example_workflows/api/row_split_flux.json").read_text("utf-8"))
    example["1"]["inputs"]["unet_name"] = "tiny_flux.safetensors"
    without_large_files(example, "row_split")
    history = server.run(example)
    assert history["status"]["status_str"] == "success"
    (report,) = history["outputs"]["13"]["leandit"]
    assert report["summary"]["layers_routed"] == 20
    assert {row["backend"] for row in report["summary"]["shapes"]} == {"cpu"}


def test_the_example_for_attention_runs_with_names_as_people_write_them(server: Any) -> None:
    example = json.loads((ROOT / "example_workflows/api/attention_flux.json").read_text("utf-8"))
    example["1"]["inputs"]["unet_name"] = "tiny_flux.safetensors"
    example["13"]["inputs"] |= {"dense": "Flash-Attention", "sparse": "SOL"}
    without_large_files(example, "attention")
    history = server.run(example)
    assert history["status"]["status_str"] == "success"
    (report,) = history["outputs"]["13"]["leandit"]
    assert (report["summary"]["dense"], report["summary"]["sparse"]) == ("fa", "sol_attn")
    assert "needs an NVIDIA card" in report["summary"]["refusals"]["fa"]
    example["13"]["inputs"]["dense"] = "magic"
    status, reply = server.post("/prompt", {"prompt": example})
    assert status == 400
    assert "unknown dense attention 'magic'; valid: auto, keep" in str(reply["node_errors"]["13"])


def test_the_example_for_offload_runs_and_the_second_time_from_the_cache(server: Any) -> None:
    path = ROOT / "example_workflows/api/layerwise_offload_flux.json"
    example = json.loads(path.read_text(encoding="utf-8"))
    example["1"]["inputs"]["unet_name"] = "tiny_flux.safetensors"
    without_large_files(example, "offload")
    latents = []
    for loras, words in (("bake", "are in the cache on the disk"), ("keep", "was quantized")):
        example["2"]["inputs"]["loras"] = loras  # without LoRAs it changes nothing, but runs anew
        history = server.run(example)
        assert history["status"]["status_str"] == "success"
        assert words in history["outputs"]["2"]["text"][0]
        (report,) = history["outputs"]["13"]["leandit"]
        assert report["node"] == "LeanDiTLayerwiseOffload"
        assert report["summary"]["blocks"] == 4
        assert "ComfyUI runs on the CPU" in report["summary"]["why_not"]
        latents.append(saved_latent(server, history, "11"))
    assert torch.equal(*latents)
    assert list((server.folder / "cache/leandit/weights").glob("*.safetensors"))
    example["13"]["inputs"]["resident"] = "half"
    status, reply = server.post("/prompt", {"prompt": example})
    assert status == 400
    assert "resident must be auto or a number" in str(reply["node_errors"]["13"])


def test_switched_off_gives_the_latents_of_the_graph_without_the_node(server: Any) -> None:
    off = saved_latent(server, server.run(prompt(enabled=False)))
    without = prompt()
    without["5"]["inputs"]["model"] = ["1", 0]
    del without["2"], without["7"]
    plain = saved_latent(server, server.run(without))
    quantized = saved_latent(server, server.run(prompt()))
    assert torch.equal(off, plain)
    assert not torch.equal(quantized, plain)
    assert (quantized - plain).norm() < 0.05 * plain.norm()


def test_two_settings_and_the_source_run_in_one_graph(server: Any) -> None:
    both = prompt(group_size="16")  # ComfyUI reports a node only when it runs, not from its cache
    for new, old in (("12", "2"), ("15", "5"), ("16", "6"), ("25", "5"), ("26", "6")):
        both[new] = copy.deepcopy(both[old])
    both["12"]["inputs"] |= {"format": "w4a8_convrot", "group_size": "64"}
    both["15"]["inputs"]["model"] = ["12", 0]
    both["25"]["inputs"]["model"] = ["1", 0]
    both["16"]["inputs"]["samples"] = ["15", 0]
    both["26"]["inputs"]["samples"] = ["25", 0]
    history = server.run(both)
    assert history["status"]["status_str"] == "success"
    assert history["outputs"]["2"]["leandit"][0]["summary"]["groups"] == {"16": 20}
    assert history["outputs"]["12"]["leandit"][0]["summary"]["groups"] == {"64": 20}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"include": "re:("}, "is not a valid regular expression"),
        ({"exclude": "*"}, "no layer is selected"),
        ({"device": "gpu"}, "ComfyUI runs on the CPU"),
    ],
    ids=["malformed pattern", "nothing selected", "no gpu"],
)
def test_an_error_reaches_the_history_in_words(
    server: Any, changes: dict[str, str], words: str
) -> None:
    history = server.run(prompt(**changes))
    assert history["status"]["status_str"] == "error"
    (failure,) = [m[1] for m in history["status"]["messages"] if m[0] == "execution_error"]
    assert failure["node_type"] == "LeanDiTQuantizeModel"
    assert words in failure["exception_message"]


def test_a_value_outside_a_list_is_refused_before_it_runs(server: Any) -> None:
    status, reply = server.post("/prompt", {"prompt": prompt(format="int3")})
    assert status == 400
    assert "int3" in str(reply["node_errors"]["2"])


def test_every_input_of_every_node_has_a_tooltip_on_the_server(server: Any) -> None:
    for name, node in server.get("/object_info").items():
        if not name.startswith("LeanDiT"):
            continue
        for kind, inputs in node["input"].items():
            if kind == "hidden":
                continue
            for key, (_kind, options) in inputs.items():
                assert len(options["tooltip"]) > 20, (name, key)
        assert node["category"] == "LeanDiT"
        assert len(node["output_tooltips"]) == len(node["output"])
