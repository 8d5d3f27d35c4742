"""Runs that stream end as they should: interrupted, repeated, unloaded, side by side."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from late_device import LateDevice, streams
from offload_cases import (
    PROJECTIONS,
    error,
    flux,
    hooks,
    longer,
    on_card,
    parameters,
    patched_twice,
    with_lora,
    wrapper_of,
)

pytestmark = pytest.mark.usefixtures("inference")


STREAMED_KEY = "diffusion_model.double_blocks.1.img_attn.proj.weight"


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
    tiny: Any, offload: Any, kind: str
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
    (device,) = streams()
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
    one, other = offload(model), with_lora(offload(model), STREAMED_KEY)
    reference = with_lora(held(model), STREAMED_KEY)
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


def test_runs_leave_no_memory_behind(tiny: Any, offload: Any) -> None:
    model = longer(tiny, "wan")
    streamed = offload(model)
    LateDevice.made.clear()
    tiny.sample(streamed, "wan")
    devices = [weakref.ref(device) for device in LateDevice.made]
    LateDevice.made.clear()
    gc.collect()
    tracemalloc.start()
    sizes = []
    for _ in range(3):
        tiny.sample(streamed, "wan")
        devices += [weakref.ref(device) for device in LateDevice.made]
        LateDevice.made.clear()
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


def test_calls_of_other_models_in_a_run_pass_through(tiny: Any, offload: Any) -> None:
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


def test_a_load_of_the_model_in_the_middle_of_a_run_finds_comfyuis_order(
    tiny: Any, offload: Any, budget: Any
) -> None:
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    model, size = flux(tiny)
    patched = with_lora(model, *PROJECTIONS)
    budget(0.6 * size)
    expected = tiny.sample(patched, "flux", 4)
    streamed = offload(patched, resident="2")
    calls = [0]

    def loads(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            comfy.model_management.load_models_gpu([executor.class_obj.current_patcher])
        assert patched_twice(streamed) == []
        return executor(*args, **kwargs)

    streamed.add_wrapper(WrappersMP.APPLY_MODEL, loads)
    assert error(tiny.sample(streamed, "flux", 4), expected) < 1e-6
    assert error(tiny.sample(patched, "flux", 4), expected) < 1e-6


def test_a_load_that_fails_takes_the_model_off_the_card(
    tiny: Any, offload: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy.model_patcher import ModelPatcher

    model, size = flux(tiny)
    expected = tiny.sample(model, "flux")
    budget(0.6 * size)
    patch, load = ModelPatcher.patch_weight_to_device, ModelPatcher.load
    loads, calls = [0], [0]

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        loads[0] += 1
        return load(self, *args, **kwargs)

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if loads[0] == 2:  # the first is ComfyUI's own
            calls[0] += 1
            if calls[0] == 3:
                raise ZeroDivisionError
        return patch(self, *args, **kwargs)

    monkeypatch.setattr(ModelPatcher, "patch_weight_to_device", failing)
    monkeypatch.setattr(ModelPatcher, "load", counted)
    streamed = offload(model, resident="3")
    with pytest.raises(ZeroDivisionError):
        tiny.sample(streamed, "flux")
    assert on_card(model) == 0
    assert model.model.model_loaded_weight_memory == 0
    monkeypatch.undo()
    assert error(tiny.sample(streamed, "flux"), expected) < 1e-6
    assert error(tiny.sample(model, "flux"), expected) < 1e-6


@pytest.mark.parametrize("where", ["a copy", "an allocation"])
def test_an_interrupt_while_the_ring_is_made_leaves_nothing(
    tiny: Any, offload: Any, budget: Any, where: str
) -> None:
    import comfy.model_management

    class Interrupted(LateDevice):
        def copy(self, block: int, buffer: torch.Tensor) -> int:
            if where == "a copy" and len(self.copies) == 1:
                raise comfy.model_management.InterruptProcessingException
            return super().copy(block, buffer)

        def allocate(self, nbytes: int) -> torch.Tensor:
            if where == "an allocation" and self.alive:
                raise comfy.model_management.InterruptProcessingException
            return super().allocate(nbytes)

    model, size = flux(tiny)
    model = with_lora(model, *PROJECTIONS)
    budget(0.6 * size)
    expected = tiny.sample(model, "flux")
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(offload(model, device=Interrupted, resident="2"), "flux")
    assert error(tiny.sample(model, "flux"), expected) < 1e-6
    assert error(tiny.sample(offload(model, resident="2"), "flux"), expected) < 1e-6
