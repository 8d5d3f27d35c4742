"""Layerwise offload on models of a real ComfyUI, with a device that copies as late as it may."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from leandit.kernels.attention.select import AttentionSettings
from leandit.kernels.dispatch import LinearSettings
from leandit.kernels.row_split import RowSplit
from leandit.quant.linear_plan import filters_from
from leandit.quant.offload_settings import OffloadSettings, offload_settings_from
from leandit.quant.settings import settings_from

pytestmark = pytest.mark.usefixtures("inference")

LONGER: dict[str, dict[str, int]] = {
    "flux": {"depth": 3, "depth_single_blocks": 3},
    "wan": {"num_layers": 5},
    "qwen_image": {"num_layers": 5},
    "z_image": {"n_layers": 5},
    "minimax_h3": {"num_layers": 5},
    "hunyuan_video": {"depth": 3, "depth_single_blocks": 3},
    "ltxv": {"num_layers": 5},
}
"""Enough blocks for a ring of two or three to go around."""

STREAMED_KEY = "diffusion_model.double_blocks.1.img_attn.proj.weight"


@pytest.fixture
def late(load_helper: Any) -> Iterator[Any]:
    """The module of the device; every device made in the test must have given everything back."""
    module = load_helper("late_device")
    module.LateDevice.made.clear()
    yield module
    for device in module.LateDevice.made:
        assert not device.alive
        assert not device.waiting


@pytest.fixture
def offload(late: Any) -> Callable[..., Any]:
    """The node's function with that device; mode on, one resident block, unless told otherwise."""
    from leandit.host.offload import layerwise_offload

    def function(model: Any, device: Any = late.LateDevice, **settings: Any) -> Any:
        chosen = offload_settings_from(**{"mode": "on", "resident": "1", **settings})
        return layerwise_offload(model, chosen, None, lambda _: device)[0]

    return function


@pytest.fixture
def held(comfyui: Any) -> Callable[..., Any]:
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


def wrapper_of(model: Any) -> Any:
    from leandit.host.offload import KEY

    return next(by_key[KEY][0].__self__ for by_key in model.wrappers.values() if by_key.get(KEY))


def streams(late: Any) -> list[Any]:
    """The devices that had blocks to copy; others only measure."""
    return [device for device in late.LateDevice.made if len(device.blocks)]


def longer(tiny: Any, family: str, dtype: torch.dtype = torch.float32) -> Any:
    return tiny.build(family, dtype, **LONGER[family])


def parameters(model: Any) -> dict[str, int]:
    """The identity of every Parameter, by name."""
    return {name: id(p) for name, p in model.model.diffusion_model.named_parameters()}


def hooks(model: Any) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.model.modules()
    )


@pytest.mark.parametrize("prefetch", ["1", "3"])
@pytest.mark.parametrize("family", LONGER)
def test_the_output_is_the_same_bit_for_bit(
    tiny: Any, offload: Any, late: Any, family: str, prefetch: str
) -> None:
    model = longer(tiny, family)
    expected = tiny.sample(model, family)
    before = parameters(model)
    streamed = offload(model, prefetch=prefetch)
    assert torch.equal(tiny.sample(streamed, family), expected)
    assert parameters(model) == before
    assert hooks(model) == 0
    (device,) = streams(late)
    sizes = [block.nbytes for block in device.blocks]
    moving = [index for index, size in enumerate(sizes) if size]
    assert len(moving) == len(sizes) - 1
    assert set(device.copies) == set(moving)
    # One copy of each block in every forward, and what was copied ahead for one more.
    assert len(device.copies) >= 2 * len(moving) - int(prefetch) - 1
    assert device.most_bytes == (int(prefetch) + 1) * max(sizes)
    summary = wrapper_of(streamed).last_report.summary
    assert summary["streaming"] is True
    assert summary["streamed_bytes_per_step"] == sum(sizes)
    assert torch.equal(tiny.sample(model, family), expected)


ORDERS = list(permutations(["quantize", "row split", "attention", "offload"]))


@pytest.mark.parametrize("order", ORDERS, ids=[", ".join(order) for order in ORDERS])
def test_it_chains_with_the_other_nodes_in_any_order(
    tiny: Any, offload: Any, late: Any, order: tuple[str, ...]
) -> None:
    from leandit.host.attention import select_attention
    from leandit.host.quantize import quantize_model
    from leandit.host.row_split import row_split_linear

    routing = LinearSettings(RowSplit("fixed", 7, 1))
    steps: dict[str, Callable[[Any], Any]] = {
        "quantize": lambda m: quantize_model(m, settings_from())[0],
        "row split": lambda m: row_split_linear(m, routing, filters_from())[0],
        "attention": lambda m: select_attention(m, AttentionSettings(dense="sdpa")),
        "offload": offload,
    }
    model = longer(tiny, "flux", torch.bfloat16)
    plain = model
    for name in order:
        model = steps[name](model)
        plain = plain if name == "offload" else steps[name](plain)
    expected = tiny.sample(plain, "flux")
    assert torch.equal(tiny.sample(model, "flux"), expected)
    (device,) = streams(late)
    assert len(set(device.copies)) == 5
    int8 = sum(b.nbytes for b in device.blocks)
    assert int8 < 0.6 * sum(
        p.numel() * 2 for n, p in plain.model.diffusion_model.named_parameters() if "blocks." in n
    )


def patches(tiny: Any, load_helper: Any, seed: int = 0) -> dict[str, Any]:
    """A LoRA on a layer in a streamed block, and one outside of the blocks."""
    generator = torch.Generator().manual_seed(seed)
    difference = torch.randn(256, 256, generator=generator) * 0.05
    return {STREAMED_KEY: ("diff", (difference,))}


@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("order", ["before the node", "after the node"])
def test_loras_act_on_streamed_weights(
    tiny: Any, offload: Any, held: Any, load_helper: Any, order: str, kind: str
) -> None:
    model = longer(tiny, "flux")
    if kind == "int8":
        from leandit.host.quantize import quantize_model

        model = quantize_model(model, settings_from())[0]
    without = tiny.sample(model, "flux")
    results = {}
    for node in (offload, held):
        if order == "before the node":
            patched = model.clone()
            patched.add_patches(patches(tiny, load_helper))
            changed = node(patched)
        else:
            changed = node(model)
            changed.add_patches(patches(tiny, load_helper))
        results[node] = tiny.sample(changed, "flux")
        # Another LoRA in the next run, and none in the one after.
        other = node(model)
        other.add_patches(patches(tiny, load_helper, seed=1))
        results[node, "changed"] = tiny.sample(other, "flux")
        results[node, "none"] = tiny.sample(node(model), "flux")
    assert torch.equal(results[offload], results[held])
    assert torch.equal(results[offload, "changed"], results[held, "changed"])
    assert torch.equal(results[offload, "none"], without)
    assert not torch.equal(results[offload], without)
    assert not torch.equal(results[offload], results[offload, "changed"])


@pytest.mark.parametrize("kind", ["float", "int8", "int8 row split"])
def test_baked_loras_are_in_the_weights_once(
    tiny: Any, offload: Any, load_helper: Any, kind: str
) -> None:
    from leandit.host.quantize import quantize_model
    from leandit.host.row_split import row_split_linear

    model = longer(tiny, "flux", torch.bfloat16 if kind != "float" else torch.float32)
    if kind != "float":
        model = quantize_model(model, settings_from())[0]
    if kind == "int8 row split":
        routing = LinearSettings(RowSplit("fixed", 7, 1))
        model = row_split_linear(model, routing, filters_from())[0]
    without = tiny.sample(model, "flux")
    patched = model.clone()
    patched.add_patches(patches(tiny, load_helper))
    expected = tiny.sample(patched, "flux")
    baked = offload(patched, lora="bake")
    assert STREAMED_KEY in patched.patches
    assert STREAMED_KEY not in baked.patches
    result = tiny.sample(baked, "flux")
    assert (result - expected).norm() < (1e-5 if kind == "float" else 0.02) * expected.norm()
    assert (result - without).norm() > 0.02 * expected.norm()
    weights = [
        m.model.diffusion_model.double_blocks[1].img_attn.proj.weight for m in (model, baked)
    ]
    assert type(weights[0]) is type(weights[1])
    if kind != "float":
        assert weights[0]._layout_cls == weights[1]._layout_cls
    assert torch.equal(tiny.sample(model, "flux"), without)


def broken(model: Any, error: BaseException) -> Callable[[], None]:
    """Make the fourth call of a layer inside a streamed block raise; returns what undoes it."""
    layer = model.model.diffusion_model.double_blocks[1].img_mlp[0]
    calls = [0]

    def raising(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise error

    return layer.register_forward_pre_hook(raising).remove


@pytest.mark.parametrize("kind", ["an interrupt", "an exception"])
def test_whatever_ends_a_block_leaves_the_model_as_it_was(
    tiny: Any, offload: Any, late: Any, kind: str
) -> None:
    import comfy.model_management

    error = (
        comfy.model_management.InterruptProcessingException()
        if kind == "an interrupt"
        else ZeroDivisionError("in a block")
    )
    model = longer(tiny, "flux")
    expected = tiny.sample(model, "flux")
    streamed = offload(model)
    before = parameters(model)
    undo = broken(model, error)
    with pytest.raises(type(error)):
        tiny.sample(streamed, "flux")
    undo()
    assert parameters(model) == before
    assert hooks(model) == 0
    (device,) = streams(late)
    assert not device.alive
    assert wrapper_of(streamed)._run is None
    assert torch.equal(tiny.sample(streamed, "flux"), expected)
    assert torch.equal(tiny.sample(model, "flux"), expected)


def test_an_exception_that_the_model_catches_does_no_harm(tiny: Any, offload: Any) -> None:
    model = longer(tiny, "flux")
    expected = tiny.sample(model, "flux")
    block = model.model.diffusion_model.double_blocks[1]

    def again(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        with contextlib.suppress(AttributeError, TypeError):
            block(*[None] * 7)
        return extra["original_block"](args)

    streamed = offload(model)
    for index in range(3):
        streamed.set_model_patch_replace(again, "dit", "double_block", index)
    before = parameters(model)
    assert torch.equal(tiny.sample(streamed, "flux"), expected)
    assert parameters(model) == before


def test_blocks_that_are_skipped_or_repeated_stay_right(tiny: Any, offload: Any) -> None:
    model = longer(tiny, "wan").clone()

    def skipped(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        return {"img": args["img"]}

    def twice(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        out = extra["original_block"](args)
        return extra["original_block"]({**args, "img": out["img"]})

    model.set_model_patch_replace(skipped, "dit", "double_block", 1)
    model.set_model_patch_replace(twice, "dit", "double_block", 3)
    expected = tiny.sample(model, "wan", 4)
    assert torch.equal(tiny.sample(offload(model), "wan", 4), expected)


def test_a_weight_that_moves_in_the_middle_of_a_run_is_not_taken_for_the_old_one(
    tiny: Any, offload: Any
) -> None:
    from comfy.patcher_extension import WrappersMP

    model = longer(tiny, "flux")
    clone = model.clone()
    clone.add_patches({STREAMED_KEY: ("diff", (torch.eye(256) * 0.1,))})
    streamed = offload(clone, resident="0")
    calls = [0]

    def loads_more(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:  # as when another model leaves the card: everything is patched in place
            executor.class_obj.current_patcher.partially_load(torch.device("cpu"), 1e32)
        return executor(*args, **kwargs)

    streamed.add_wrapper(WrappersMP.APPLY_MODEL, loads_more)
    result = tiny.sample(streamed, "flux", 3)
    expected = tiny.sample(clone, "flux", 3)
    assert calls[0] == 3
    assert (result - expected).norm() < 1e-5 * expected.norm()


def test_two_models_over_one_base_take_turns(tiny: Any, offload: Any, held: Any) -> None:
    model = longer(tiny, "flux")
    plain = tiny.sample(model, "flux")
    one, other = offload(model), offload(model)
    other.add_patches(patches(tiny, None))
    reference = held(model)
    reference.add_patches(patches(tiny, None))
    patched = tiny.sample(reference, "flux")
    for _ in range(2):
        assert torch.equal(tiny.sample(one, "flux"), plain)
        assert torch.equal(tiny.sample(other, "flux"), patched)
    assert torch.equal(tiny.sample(model, "flux"), plain)


def test_unloading_and_loading_again_changes_nothing(tiny: Any, offload: Any) -> None:
    import comfy.model_management

    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    streamed = offload(model)
    for _ in range(2):
        assert torch.equal(tiny.sample(streamed, "wan"), expected)
        comfy.model_management.unload_all_models()
    assert model.model.model_loaded_weight_memory == 0
    assert not model.backup


def test_runs_leave_no_memory_behind(tiny: Any, offload: Any, late: Any) -> None:
    model = longer(tiny, "wan")
    streamed = offload(model)
    late.LateDevice.made.clear()
    tiny.sample(streamed, "wan")
    devices = [weakref.ref(device) for device in late.LateDevice.made]
    late.LateDevice.made.clear()
    gc.collect()
    tracemalloc.start()
    sizes = []
    for _ in range(3):
        tiny.sample(streamed, "wan")
        devices += [weakref.ref(device) for device in late.LateDevice.made]
        late.LateDevice.made.clear()
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(devices) == 2 * 4
    assert all(device() is None for device in devices)
    assert sizes[2] - sizes[1] < 64_000
    base = weakref.ref(model.model)
    import comfy.model_management

    comfy.model_management.unload_all_models()
    del model, streamed
    gc.collect()
    assert base() is None


def timed_device(late: Any, without: float, streaming: float) -> Any:
    """A device whose clock says how long forwards take, with and without copies."""

    class Timed(late.LateDevice):
        def mark_compute(self) -> tuple[str, int]:
            return ("compute", len(self.copies))

        def seconds_between(self, first: Any, second: Any) -> float:
            if not isinstance(first, tuple) or not isinstance(second, tuple):
                return 0.0
            return streaming if second[1] > first[1] else without

    return Timed


@pytest.mark.parametrize(
    ("without", "streaming", "stays"),
    [(1.0, 0.7, True), (1.0, 0.99, False), (1.0, 1.5, False)],
    ids=["a gain of 30 percent", "a gain of 1 percent", "a loss"],
)
def test_auto_measures_and_keeps_what_pays(
    tiny: Any, offload: Any, late: Any, without: float, streaming: float, stays: bool
) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan", 9)
    streamed = offload(model, device=timed_device(late, without, streaming), mode="auto")
    assert torch.equal(tiny.sample(streamed, "wan", 9), expected)
    summary = wrapper_of(streamed).last_report.summary
    assert summary["gain"] == pytest.approx(1 - streaming / without)
    assert summary["streaming"] is stays
    moving = [b for b in streams(late)[-1].blocks if b.nbytes]
    copies = len(streams(late)[-1].copies)
    # Three forwards without, three with, and three more where it stays on.
    assert copies <= len(moving) * (6 if stays else 3) + 2
    assert copies >= len(moving) * (6 if stays else 3) - 2
    # The next run remembers.
    late.LateDevice.made.clear()
    tiny.sample(streamed, "wan", 2)
    assert bool(streams(late)) is stays
    assert wrapper_of(streamed).last_report.summary["streaming"] is stays


def test_calls_of_other_models_in_a_run_pass_through(tiny: Any, offload: Any, late: Any) -> None:
    from types import SimpleNamespace

    from comfy.patcher_extension import WrappersMP

    model, other = longer(tiny, "wan"), longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    streamed = offload(model)
    seen = []

    class Executor(SimpleNamespace):
        def __call__(self, *args: Any) -> int:
            seen.append(hooks(other))
            return 7

    def also(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls = wrapper_of(streamed)._run._forwards
        stranger = Executor(class_obj=other.model.diffusion_model)
        assert wrapper_of(streamed).forward(stranger, torch.zeros(1)) == 7
        assert wrapper_of(streamed)._run._forwards == calls
        return executor(*args, **kwargs)

    streamed.add_wrapper(WrappersMP.APPLY_MODEL, also)
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    assert seen == [0, 0]


def test_a_node_after_a_node_replaces_it(tiny: Any, offload: Any, late: Any) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    assert torch.equal(tiny.sample(offload(offload(model)), "wan"), expected)
    assert len(streams(late)) == 1
    late.LateDevice.made.clear()
    assert torch.equal(tiny.sample(offload(offload(model), mode="off"), "wan"), expected)
    assert not late.LateDevice.made


def test_blocks_compiled_one_by_one_stream(tiny: Any, offload: Any, late: Any) -> None:
    import torch._dynamo.testing
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    torch._dynamo.reset()
    model = tiny.build("wan", num_layers=4)
    expected = tiny.sample(model, "wan")
    streamed = offload(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    keys = [f"diffusion_model.blocks.{index}" for index in range(4)]
    set_torch_compile_wrapper(streamed, backend=counter, options=None, mode=None, keys=keys)
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    assert wrapper_of(streamed).last_report.summary["forwards"] == 2
    assert len(set(streams(late)[-1].copies)) == 3
    # ComfyUI marks modules when it takes them off the card, which torch compiles for once more.
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    frames = counter.frame_count
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    assert counter.frame_count == frames
    torch._dynamo.reset()


def test_a_model_compiled_as_a_whole_is_left_alone(tiny: Any, offload: Any) -> None:
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    torch._dynamo.reset()
    model = tiny.build("wan")
    expected = tiny.sample(model, "wan", 1)
    streamed = offload(model)
    set_torch_compile_wrapper(streamed, backend="eager")
    assert torch.equal(tiny.sample(streamed, "wan", 1), expected)
    assert "one graph" in wrapper_of(streamed).last_report.text
    torch._dynamo.reset()


class Packed(torch.Tensor):
    """Like the tensors of ComfyUI-GGUF: bytes, and in attributes what they stand for."""

    kind: str


def test_packed_tensors_of_other_packages_stream_with_their_attributes(
    tiny: Any, offload: Any
) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    layer = model.model.diffusion_model.blocks[2].ffn[0]
    packed: Any = torch.nn.Parameter(layer.weight.clone().as_subclass(Packed), False)
    packed.kind = "Q8_0"
    layer.weight = packed
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = layer._parameters["weight"]
        seen.append((type(weight), weight.kind, id(weight)))
        plain = weight.as_subclass(torch.Tensor)
        return torch.nn.functional.linear(x, plain, layer.bias)

    layer.forward = forward
    assert torch.equal(tiny.sample(offload(model), "wan"), expected)
    assert {entry[:2] for entry in seen} == {(Packed, "Q8_0")}
    assert id(layer.weight) not in {entry[2] for entry in seen}


def test_on_a_cpu_the_node_changes_nothing_and_says_so(tiny: Any) -> None:
    from leandit.host.offload import layerwise_offload

    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    clone, report = layerwise_offload(model, OffloadSettings())
    assert "ComfyUI runs on the CPU" in report.text
    assert report.summary["manager"] == "cpu"
    assert report.summary["blocks"] == 5
    assert torch.equal(tiny.sample(clone, "wan"), expected)
    after = wrapper_of(clone).last_report
    assert "ComfyUI runs on the CPU" in after.text


def test_report_mode_measures_and_changes_nothing(tiny: Any, offload: Any, late: Any) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan", 4)
    watched = offload(model, mode="report")
    assert torch.equal(tiny.sample(watched, "wan", 4), expected)
    report = wrapper_of(watched).last_report
    assert report.summary["streaming"] is False
    assert report.summary["forwards"] == 4
    assert report.summary["step_seconds"] > 0
    assert not streams(late)
    assert report.summary["streamed_bytes_per_step"] == 0  # all of it is loaded


def nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ComfyUI see a card with just what one step needs beside the model."""
    import comfy.model_management

    free = comfy.model_management.minimum_inference_memory()

    def get_free_memory(device: Any = None, torch_free_too: bool = False) -> Any:
        return (free, free) if torch_free_too else free

    monkeypatch.setattr(comfy.model_management, "get_free_memory", get_free_memory)


def test_a_number_that_does_not_fit_is_lowered_and_said(
    tiny: Any, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    # Two blocks have to go for two buffers.
    nearly_full(monkeypatch)
    streamed = offload(model, resident="4")
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    report = wrapper_of(streamed).last_report
    assert report.summary["streamed_blocks"] == 2
    assert "4 blocks were to stay on the card, 3 fit" in report.text


def test_memory_kept_free_is_taken_off_the_model(
    tiny: Any, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan")
    nearly_full(monkeypatch)
    assert torch.equal(tiny.sample(offload(model, resident="auto"), "wan"), expected)
    streamed = offload(model, resident="auto", keep_free_gb=0.002)
    assert torch.equal(tiny.sample(streamed, "wan"), expected)
    summary = wrapper_of(streamed).last_report.summary
    assert summary["streaming"] is True
    wanted = 0.002 * 2**30 + summary["ring_bytes"]
    taken = summary["model_bytes"] - model.model.model_loaded_weight_memory
    # ComfyUI frees somewhat more, for buffers of its own.
    assert 0.95 * wanted <= taken <= 1.6 * wanted


def test_the_books_of_comfyui_stay_right(tiny: Any, offload: Any) -> None:
    from comfy.patcher_extension import WrappersMP

    model = longer(tiny, "wan")
    streamed = offload(model, resident="2")
    books = []

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        base = executor.class_obj
        loaded = sum(
            p.numel() * p.element_size()
            for module in base.modules()
            if getattr(module, "comfy_patched_weights", False)
            for p in module._parameters.values()
            if p is not None
        )
        books.append((base.model_loaded_weight_memory, loaded, base.model_lowvram))
        return executor(*args, **kwargs)

    streamed.add_wrapper(WrappersMP.APPLY_MODEL, look)
    tiny.sample(streamed, "wan")
    said, loaded, partly = books[0]
    assert said == pytest.approx(loaded, rel=0.01)
    assert partly is True


@pytest.mark.parametrize(
    ("family", "queues"), [("minimax_h3", True), ("flux", False), ("wan", False)]
)
def test_models_with_a_queue_of_their_own_are_known(tiny: Any, family: str, queues: bool) -> None:
    from leandit.host.managers import has_own_queue

    assert has_own_queue(tiny.build(family).model.diffusion_model) is queues
