"""Quantized weights from the cache: the same bits, without quantizing."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.loaders.weight_cache import WeightCache
from leandit.quant.settings import settings_from

pytestmark = pytest.mark.usefixtures("inference")

QKV = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
KEPT = "diffusion_model.img_in.weight"


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "weights")


@pytest.fixture
def counted(comfyui: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers that are really quantized."""
    from leandit.host import quantize

    names: list[str] = []
    measure = quantize.quantize_and_measure

    def count(weight: torch.Tensor, format: Any, group: Any, name: str) -> Any:
        names.append(name)
        return measure(weight, format, group, name)

    monkeypatch.setattr(quantize, "quantize_and_measure", count)
    return names


@pytest.fixture
def quantize(cache: WeightCache, comfyui: Path) -> Callable[..., Any]:
    from leandit.host.quantize import quantize_model

    def function(
        model: Any, mode: str = "disk", loras: str = "bake", folder: Any = cache, **settings: Any
    ) -> Any:
        return quantize_model(model, settings_from(**settings), loras, "auto", mode, folder)

    return function


def weights(model: Any) -> dict[str, list[torch.Tensor]]:
    """Codes and scales of every quantized layer."""
    found = {}
    for name, weight in model.model.diffusion_model.named_parameters():
        if hasattr(weight, "_qdata"):
            found[name] = [weight._qdata, *weight.state_dict().values()]
    return found


def same(one: Any, other: Any) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for name in first
        for a, b in zip(first[name], second[name], strict=True)
    )


@pytest.mark.parametrize("format", ["int8_convrot", "int8", "w4a8_convrot", "w4a4_convrot"])
def test_a_hit_gives_the_same_bits_and_quantizes_nothing(
    tiny: Any, quantize: Any, counted: list[str], format: str
) -> None:
    model = tiny.build("flux", torch.bfloat16)
    memory, in_memory = quantize(model, "memory", format=format)
    layers = len(counted)
    miss, first = quantize(model, format=format)
    assert len(counted) == 2 * layers > 0
    hit, second = quantize(tiny.build("flux", torch.bfloat16), format=format)
    assert len(counted) == 2 * layers
    assert same(memory, miss)
    assert same(memory, hit)
    assert "are in the cache on the disk now" in first.text
    assert second.text.startswith(f"{layers} of 36 layers are {format}, preset auto")
    assert "read from the cache on the disk in" in second.text
    states = [report.summary["cache"] for report in (in_memory, first, second)]
    assert states == ["memory", "written", "hit"]
    assert second.layers == first.layers
    expected = tiny.sample(memory, "flux")
    assert torch.equal(tiny.sample(hit, "flux"), expected)
    assert torch.equal(tiny.sample(miss, "flux"), expected)


def test_options_patches_and_wrappers_of_the_model_are_kept(tiny: Any, quantize: Any) -> None:
    model = tiny.build("flux", torch.bfloat16)
    model.add_patches({KEPT: ("diff", (torch.ones(256, 64) * 0.01,))})
    model.model_options["transformer_options"]["mark"] = 7
    model.set_attachments("mark", "here")
    quantize(model)
    hit, report = quantize(model)
    assert "nothing was quantized" in report.text
    assert KEPT in hit.patches
    assert hit.model_options["transformer_options"]["mark"] == 7
    assert hit.get_attachment("mark") == "here"


def test_weights_lie_in_the_file_and_loras_still_work(tiny: Any, quantize: Any) -> None:
    model = tiny.build("flux", torch.bfloat16)
    quantize(model)
    hit, _ = quantize(model)
    memory, _ = quantize(model, "memory")
    results = []
    for patcher in (hit, memory):
        clone = patcher.clone()
        clone.add_patches({QKV: ("diff", (torch.ones(768, 256) * 0.02,))})
        results.append(tiny.sample(clone, "flux"))
        tiny.sample(patcher, "flux")
    assert torch.equal(*results)
    assert same(hit, memory)  # the file was not written to
    again, report = quantize(model)
    assert "nothing was quantized" in report.text
    assert same(again, memory)


def changed_weight(model: Any) -> None:
    model.model.diffusion_model.double_blocks[0].img_attn.qkv.weight.data[5, 7] += 0.5


def with_lora(strength: float) -> Callable[[Any], None]:
    def patch(model: Any) -> None:
        model.add_patches({QKV: ("diff", (torch.ones(768, 256) * 0.02,))}, strength)

    return patch


CHANGES: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "one value of one weight": (changed_weight, {}),
    "a LoRA": (with_lora(1.0), {}),
    "a LoRA of another strength": (with_lora(0.5), {}),
    "another format": (lambda model: None, {"format": "int8"}),
    "another group": (lambda model: None, {"group_size": "64"}),
    "a layer excluded": (lambda model: None, {"exclude": "double_blocks.0.*"}),
    "another preset": (lambda model: None, {"preset": "none"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_weights_is_a_miss(
    tiny: Any, quantize: Any, counted: list[str], change: str
) -> None:
    quantize(tiny.build("flux", torch.bfloat16))
    alter, settings = CHANGES[change]
    model = tiny.build("flux", torch.bfloat16)
    alter(model)
    counted.clear()
    result, _ = quantize(model, **settings)
    assert counted
    assert same(result, quantize(model, "memory", **settings)[0])
    counted.clear()
    quantize(model, **settings)
    assert not counted


def test_keeping_loras_does_not_make_them_part_of_the_weights(
    tiny: Any, quantize: Any, counted: list[str]
) -> None:
    quantize(tiny.build("flux", torch.bfloat16), loras="keep")
    counted.clear()
    model = tiny.build("flux", torch.bfloat16)
    with_lora(1.0)(model)
    hit, _ = quantize(model, loras="keep")
    assert not counted
    assert QKV in hit.patches


def test_a_newer_arithmetic_is_a_miss(
    tiny: Any, quantize: Any, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.host import fingerprint

    model = tiny.build("flux", torch.bfloat16)
    quantize(model)
    counted.clear()
    monkeypatch.setattr(fingerprint, "ARITHMETIC_VERSION", 99)
    quantize(model)
    assert counted


@pytest.mark.parametrize("kind", ["lora", "lokr", "loha", "dora", "diff", "overwrite"])
def test_every_kind_of_lora_is_told_from_another(
    tiny: Any, quantize: Any, counted: list[str], load_helper: Any, kind: str
) -> None:
    kinds = load_helper("test_lora")
    model = tiny.build("flux", torch.bfloat16)
    model.add_patches({kinds.PROJ: getattr(kinds, kind)(256, 256)})
    first, _ = quantize(model)
    counted.clear()
    again, _ = quantize(model)
    assert not counted
    assert same(first, again)
    model.add_patches({kinds.PROJ: getattr(kinds, kind)(256, 256)}, 0.5)
    quantize(model)
    assert counted


def test_a_lora_that_cannot_be_read_is_held_in_memory_with_the_reason(
    tiny: Any, quantize: Any, cache: WeightCache
) -> None:
    model = tiny.build("flux", torch.bfloat16)
    model.add_patches({(QKV, None, lambda weight: weight): ("diff", (torch.ones(768, 256),))})
    result, report = quantize(model)
    assert "held in memory, not in the cache: a LoRA holds function" in report.text
    assert same(result, quantize(model, "memory")[0])
    assert not cache.entries()


def spoil(path: Path) -> None:
    """Turn one bit in the middle of the data."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": spoil,
    "without a record": lambda path: path.with_suffix(".json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(
    tiny: Any, quantize: Any, cache: WeightCache, counted: list[str], damage: str
) -> None:
    model = tiny.build("flux", torch.bfloat16)
    first, _ = quantize(model)
    memory, _ = quantize(model, "memory")
    (entry,) = cache.entries()
    del first
    gc.collect()
    DAMAGES[damage](cache.folder / f"{entry.key}.safetensors")
    counted.clear()
    again, report = quantize(model)
    assert counted
    assert same(again, memory)
    assert report.summary["cache"] == "rewritten"
    assert "were damaged and were made again" in report.text
    counted.clear()
    assert quantize(model)[1].summary["cache"] == "hit"
    assert not counted


def test_a_full_disk_means_memory_and_leaves_nothing(
    tiny: Any, quantize: Any, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.loaders import weight_cache

    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda _: usage)
    model = tiny.build("flux", torch.bfloat16)
    result, report = quantize(model)
    assert "held in memory, not in the cache: it needs" in report.text
    assert "GB free" in report.text
    assert same(result, quantize(model, "memory")[0])
    assert not list(cache.folder.glob("*.safetensors"))


def test_a_disk_that_fills_up_while_writing_means_memory(
    tiny: Any, quantize: Any, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.loaders import stream

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream.os, "fsync", full)
    model = tiny.build("flux", torch.bfloat16)
    result, report = quantize(model)
    assert "No space left on device" in report.text
    assert same(result, quantize(model, "memory")[0])
    assert [path.name for path in cache.folder.iterdir()] == [".lock"]


def test_an_interrupt_while_writing_leaves_nothing(
    tiny: Any, quantize: Any, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.model_management
    from leandit.host import quantize as module

    calls = [0]
    measure = module.quantize_and_measure

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise comfy.model_management.InterruptProcessingException
        return measure(*args)

    model = tiny.build("flux", torch.bfloat16)
    monkeypatch.setattr(module, "quantize_and_measure", interrupted)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        quantize(model)
    assert [path.name for path in cache.folder.iterdir()] == [".lock"]
    monkeypatch.setattr(module, "quantize_and_measure", measure)
    assert same(quantize(model)[0], quantize(model, "memory")[0])


def test_an_entry_is_in_use_while_anything_holds_its_weights(
    tiny: Any, quantize: Any, cache: WeightCache
) -> None:
    from leandit.host.row_split import row_split_linear
    from leandit.kernels.dispatch import LinearSettings
    from leandit.quant.linear_plan import filters_from

    model = tiny.build("flux", torch.bfloat16)
    result, _ = quantize(model)
    expected = tiny.sample(result, "flux")
    assert cache.entries()[0].in_use
    assert cache.clear() == (0, cache.nbytes)
    routed, _ = row_split_linear(result, LinearSettings(), filters_from())
    gone = weakref.ref(result.model)
    import comfy.model_management

    comfy.model_management.unload_all_models()
    del result
    gc.collect()
    assert gone() is None
    assert cache.entries()[0].in_use  # the twin of the twin holds the same bytes
    assert torch.isfinite(tiny.sample(routed, "flux")).all()
    comfy.model_management.unload_all_models()
    del routed
    gc.collect()
    assert not cache.entries()[0].in_use
    again, _ = quantize(model)
    assert torch.equal(tiny.sample(again, "flux"), expected)


def test_an_entry_in_use_does_not_leave_for_another(
    tiny: Any, quantize: Any, cache: WeightCache
) -> None:
    one = tiny.build("flux", torch.bfloat16)
    first, _ = quantize(one)
    small = WeightCache(cache.folder, int(1.5 * cache.nbytes))
    other = tiny.build("flux", torch.bfloat16, seed=1)
    second, report = quantize(other, folder=small)
    assert "is in use, and leaves no room" in report.text
    assert [entry.in_use for entry in cache.entries()] == [True]
    assert same(first, quantize(one, "memory")[0])
    del first
    gc.collect()
    third, report = quantize(other, folder=small)
    assert "are in the cache on the disk now" in report.text
    assert same(second, third)
    assert len(cache.entries()) == 1


def test_auto_is_memory_where_no_dynamic_vram_is(
    tiny: Any, quantize: Any, cache: WeightCache
) -> None:
    quantize(tiny.build("flux", torch.bfloat16), "auto")
    assert not cache.folder.exists()


def test_weights_of_a_read_only_mapping_are_known_by_file_and_place(
    tiny: Any, quantize: Any, counted: list[str], tmp_path: Path
) -> None:
    """As ComfyUI's dynamic VRAM maps them: each storage says which slice of which file it is."""
    from comfy.memory_management import TensorFileSlice

    path = tmp_path / "model.bin"
    path.write_bytes(bytes(1 << 20))
    handle = os.open(path, os.O_RDONLY)

    def mapped(shift: int = 0) -> Any:
        model = tiny.build("flux", torch.bfloat16)
        offset = shift
        for parameter in model.model.diffusion_model.parameters():
            storage = parameter.untyped_storage()
            storage._comfy_tensor_file_slice = TensorFileSlice(
                handle, None, offset, parameter.nbytes
            )
            offset += parameter.nbytes
        return model

    quantize(mapped())
    counted.clear()
    model = mapped()
    quantize(model)
    assert not counted
    quantize(mapped(shift=8))
    assert counted
    counted.clear()
    os.utime(path, ns=(1, 1))
    quantize(model)
    assert counted
    os.close(handle)
    counted.clear()
    quantize(model)  # the file cannot be asked any more: its bytes are read instead
    assert counted


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    yield
    gc.collect()
