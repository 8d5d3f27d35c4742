"""Layerwise offload where ComfyUI has loaded a part of the model, as on a card that is too small.

ComfyUI's own `load` divides the model: it is given a budget for weights, as it computes one from the
memory of a card. "The card" are the modules that it has marked as loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from leandit.quant.offload_settings import offload_settings_from

pytestmark = pytest.mark.usefixtures("inference")

PROJECTIONS = [f"diffusion_model.double_blocks.{i}.img_attn.proj.weight" for i in range(3)]
OUTSIDE = "diffusion_model.guidance_in.in_layer.weight"


@pytest.fixture
def late(load_helper: Any) -> Iterator[Any]:
    module = load_helper("late_device")
    module.LateDevice.made.clear()
    yield module
    for device in module.LateDevice.made:
        assert not device.alive
        assert not device.waiting


@pytest.fixture
def offload(late: Any) -> Callable[..., Any]:
    """The node's function with that device, mode on unless told otherwise."""
    from leandit.host.offload import layerwise_offload

    def function(model: Any, device: Any = late.LateDevice, **settings: Any) -> Any:
        chosen = offload_settings_from(**{"mode": "on", **settings})
        return layerwise_offload(model, chosen, None, lambda _: device)[0]

    return function


@pytest.fixture
def budget(comfyui: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[float | None], None]:
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
def nearly_full(comfyui: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ComfyUI see a card with just what one step needs beside the weights."""
    import comfy.model_management

    free = comfy.model_management.minimum_inference_memory()
    monkeypatch.setattr(
        comfy.model_management,
        "get_free_memory",
        lambda device=None, torch_free_too=False: (free, free) if torch_free_too else free,
    )


def flux(tiny: Any) -> tuple[Any, float]:
    import comfy.model_management

    model = tiny.build("flux", depth=3, depth_single_blocks=3)
    return model, comfy.model_management.module_size(model.model)


def on_card(model: Any) -> int:
    return sum(
        parameter.nbytes
        for module in model.model.modules()
        if getattr(module, "comfy_patched_weights", False)
        for parameter in module._parameters.values()
        if parameter is not None
    )


def patched_twice(model: Any) -> list[str]:
    """Modules whose LoRA is in the weight and applied to it again when it runs."""
    return [
        name
        for name, module in model.model.named_modules()
        if getattr(module, "comfy_patched_weights", False) and module.weight_function
    ]


def last_summary(model: Any) -> dict[str, Any]:
    from leandit.host.offload import KEY

    by_kind = [by_key[KEY][0] for by_key in model.wrappers.values() if by_key.get(KEY)]
    return by_kind[0].__self__.last_report.summary


def with_lora(model: Any, *keys: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    weights = dict(model.model.named_parameters())
    clone = model.clone()
    for key in keys:
        difference = torch.randn(weights[key].shape, generator=generator) * 0.05
        clone.add_patches({key: ("diff", (difference,))})
    return clone


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("resident", ["auto", "0", "2", "99"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_what_comfyui_left_in_main_memory_streams(
    tiny: Any, offload: Any, budget: Any, late: Any, share: float, resident: str
) -> None:
    model, size = flux(tiny)
    model = with_lora(model, *PROJECTIONS)
    budget(share * size)
    expected = tiny.sample(model, "flux")
    streamed = offload(model, resident=resident)
    assert error(tiny.sample(streamed, "flux"), expected) < 1e-6
    summary = last_summary(streamed)
    if resident != "99":
        assert summary["streaming"] is True
        assert summary["streamed_bytes_per_step"] > 0
        assert any(device.copies for device in late.LateDevice.made)


def test_a_lora_is_neither_lost_nor_doubled_whatever_follows(
    tiny: Any, offload: Any, budget: Any
) -> None:
    model, size = flux(tiny)
    patched = with_lora(model, *PROJECTIONS)
    plain, reference = tiny.sample(model, "flux"), tiny.sample(patched, "flux")
    budget(0.6 * size)
    runs = [
        (patched, reference),
        (offload(patched, resident="3"), reference),
        (patched, reference),
        (offload(patched, resident="1"), reference),
        (offload(patched, resident="auto"), reference),
        (model, plain),
        (offload(model, resident="4"), plain),
        (patched, reference),
    ]
    for patcher, expected in runs:
        assert error(tiny.sample(patcher, "flux"), expected) < 1e-6
        assert patched_twice(patcher) == []


@pytest.mark.parametrize("keys", [(), PROJECTIONS], ids=["no LoRA", "a LoRA"])
@pytest.mark.usefixtures("nearly_full")
def test_runs_in_a_row_never_hold_more_than_the_budget(
    tiny: Any, offload: Any, budget: Any, keys: tuple[str, ...]
) -> None:
    from comfy.patcher_extension import WrappersMP

    model, size = flux(tiny)
    model = with_lora(model, *keys)
    limit = 0.6 * size
    budget(limit)
    streamed = offload(model, resident="3")
    seen = []

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        base = executor.class_obj
        seen.append((on_card(streamed), base.model_loaded_weight_memory))
        # What ComfyUI has set aside to cast weights of the rest is still set aside.
        assert base.model_offload_buffer_memory > 0
        return executor(*args, **kwargs)

    streamed.add_wrapper(WrappersMP.APPLY_MODEL, look)
    for _ in range(3):
        tiny.sample(streamed, "flux")
        assert on_card(streamed) <= limit
    assert len(seen) == 6
    for held, said in seen:
        assert held <= limit
        assert said == pytest.approx(held, rel=0.02)


def test_a_lora_outside_of_the_blocks_leaves_with_its_model(
    tiny: Any, offload: Any, budget: Any
) -> None:
    model, size = flux(tiny)
    plain = tiny.sample(model, "flux")
    patched = with_lora(model, OUTSIDE)
    reference = tiny.sample(patched, "flux")
    budget(0.5 * size)
    assert error(tiny.sample(offload(patched, resident="99"), "flux"), reference) < 1e-6
    assert error(tiny.sample(model, "flux"), plain) < 1e-6
    assert not model.model.diffusion_model.guidance_in.in_layer.weight_function


def sample_with_hook(tiny: Any, model: Any, hooked: bool) -> torch.Tensor:
    """Three steps with a LoRA that conditioning switches on, as ComfyUI's Create Hook LoRA does."""
    import comfy.hooks
    import comfy.sample

    given = tiny.inputs("flux")
    positive = [[c, {**options}] for c, options in given.positive]
    if hooked:
        hook = comfy.hooks.WeightHook(strength_model=1.0)
        generator = torch.Generator().manual_seed(0)
        hook.weights = {
            key: ("diff", (torch.randn(256, 256, generator=generator) * 0.05,))
            for key in PROJECTIONS
        }
        hook.need_weight_init = False
        group = comfy.hooks.HookGroup()
        group.add(hook)
        positive = comfy.hooks.set_hooks_for_conditioning(positive, group)
    return comfy.sample.sample(
        *(model, given.noise, 3, 2.0, "euler", "simple", positive, given.positive),
        given.noise * 0,
        disable_pbar=True,
        seed=1,
    )


def test_weights_that_hooks_change_in_a_run_are_not_streamed(
    tiny: Any, offload: Any, budget: Any
) -> None:
    model, size = flux(tiny)
    budget(0.6 * size)
    plain, expected = (sample_with_hook(tiny, model, hooked) for hooked in (False, True))
    assert error(expected, plain) > 0.05
    streamed = offload(model, resident="1")
    assert error(sample_with_hook(tiny, streamed, True), expected) < 1e-6
    assert "LoRA hooks are on the model" in last_summary(streamed)["why_not"]
    assert error(sample_with_hook(tiny, streamed, False), plain) < 1e-6
    assert last_summary(streamed)["why_not"] is None


def timed(late: Any, streaming: float) -> Any:
    """A device whose clock says that a forward takes 1 s, and `streaming` s with copies."""

    class Timed(late.LateDevice):
        def mark_compute(self) -> Any:
            return ("compute", len(self.copies))

        def seconds_between(self, first: Any, second: Any) -> float:
            pair = isinstance(first, tuple) and isinstance(second, tuple)
            return (streaming if second[1] > first[1] else 1.0) if pair else 0.0

    return Timed


@pytest.fixture
def spare(comfyui: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
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


@pytest.mark.parametrize("keys", [(), PROJECTIONS], ids=["no LoRA", "a LoRA"])
@pytest.mark.parametrize(("share", "room"), [(0.6, 0), (0.4, 4_000_000), (0.6, 8_000_000)])
@pytest.mark.parametrize("resident", ["auto", "2"])
def test_auto_that_switches_itself_off_gives_the_memory_back(
    tiny: Any,
    offload: Any,
    budget: Any,
    spare: Any,
    late: Any,
    resident: str,
    share: float,
    room: int,
    keys: tuple[str, ...],
) -> None:
    from comfy.patcher_extension import WrappersMP

    model, size = flux(tiny)
    model = with_lora(model, *keys)
    budget(share * size)
    spare(room)
    expected = tiny.sample(model, "flux", 9)
    stock = on_card(model)
    held: list[int] = []

    def watched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(on_card(model))
        assert patched_twice(model) == []
        return executor(*args, **kwargs)

    streamed = offload(model, device=timed(late, 1.5), mode="auto", resident=resident)
    streamed.add_wrapper(WrappersMP.DIFFUSION_MODEL, watched)
    assert error(tiny.sample(streamed, "flux", 9), expected) < 1e-6
    summary = last_summary(streamed)
    assert summary["gain"] == pytest.approx(-0.5)
    assert summary["streaming"] is False
    # The baseline has all the memory that it has without the node, and so has the rest of the run.
    assert held[:3] == [stock] * 3
    assert held[6:] == [stock] * 3
    assert error(tiny.sample(streamed, "flux", 9), expected) < 1e-6
    assert held[9:] == [stock] * 9
    assert error(tiny.sample(model, "flux", 9), expected) < 1e-6


@pytest.mark.parametrize(
    ("resident", "seconds"),
    [("2", 0.5), ("2", 1.5), ("auto", 1.5)],
    ids=["it pays", "it does not", "it does not, as ComfyUI chooses"],
)
def test_blocks_compiled_one_by_one_keep_their_loras(
    tiny: Any, offload: Any, budget: Any, spare: Any, late: Any, resident: str, seconds: float
) -> None:
    """Within ComfyUI's `apply_model` the compiled modules stand in the places of the blocks."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    torch._dynamo.reset()
    model, size = flux(tiny)
    patched = with_lora(model, *PROJECTIONS)
    plain = tiny.sample(model, "flux", 8)
    expected = tiny.sample(patched, "flux", 8)
    budget(0.8 * size)
    spare(0)
    streamed = offload(patched, device=timed(late, seconds), mode="auto", resident=resident)
    keys = ["diffusion_model.double_blocks.0", "diffusion_model.double_blocks.1"]
    set_torch_compile_wrapper(streamed, backend="eager", options=None, mode=None, keys=keys)
    for _ in range(2):
        assert error(tiny.sample(streamed, "flux", 8), expected) < 1e-6
    assert last_summary(streamed)["streaming"] is (seconds < 1)
    assert error(tiny.sample(patched, "flux", 8), expected) < 1e-6
    assert error(tiny.sample(model, "flux", 8), plain) < 1e-6
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("resident", ["auto", "2"])
@pytest.mark.usefixtures("nearly_full")
def test_buffers_that_do_not_fit_cost_nothing(
    tiny: Any, offload: Any, budget: Any, late: Any, resident: str, mode: str
) -> None:
    from comfy.patcher_extension import WrappersMP

    class Full(timed(late, 1.0)):  # type: ignore[misc]  # a class that is made
        def allocate(self, nbytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model, size = flux(tiny)
    model = with_lora(model, *PROJECTIONS)
    budget(0.6 * size)
    expected = tiny.sample(model, "flux", 5)
    stock = on_card(model)
    held: list[int] = []

    def watched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(on_card(model))
        return executor(*args, **kwargs)

    streamed = offload(model, device=Full, mode=mode, resident=resident)
    streamed.add_wrapper(WrappersMP.DIFFUSION_MODEL, watched)
    assert error(tiny.sample(streamed, "flux", 5), expected) < 1e-6
    assert held == [stock] * 5
    summary = last_summary(streamed)
    assert summary["streaming"] is False
    assert summary["ring_bytes"] == 0
    assert error(tiny.sample(model, "flux", 5), expected) < 1e-6


@pytest.mark.usefixtures("nearly_full")
def test_a_model_compiled_as_a_whole_keeps_its_memory(
    tiny: Any, offload: Any, budget: Any, late: Any
) -> None:
    from comfy.patcher_extension import WrappersMP
    from leandit.host.twin_patcher import TORCH_COMPILE_KEY

    model, size = flux(tiny)
    budget(0.6 * size)
    expected = tiny.sample(model, "flux")
    stock = on_card(model)
    streamed = offload(model, resident="2")

    def as_one_graph(executor: Any, *args: Any, **kwargs: Any) -> Any:
        """What compiling the whole model does to wrappers inside of it: they step aside."""
        assert on_card(model) == stock
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            return executor(*args, **kwargs)

    streamed.add_wrapper_with_key(WrappersMP.APPLY_MODEL, TORCH_COMPILE_KEY, as_one_graph)
    assert error(tiny.sample(streamed, "flux"), expected) < 1e-6
    assert on_card(model) == stock
    assert last_summary(streamed)["forwards"] == 0


def test_a_decision_does_not_hold_for_another_share_on_the_card(
    tiny: Any, offload: Any, budget: Any, late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.host import offload as module

    monkeypatch.setattr(module, "RESIDENCY_STEP", 1_000_000)
    model, size = flux(tiny)
    streamed = offload(model, device=timed(late, 1.5), mode="auto")
    budget(0.9 * size)
    tiny.sample(streamed, "flux", 7)
    assert last_summary(streamed)["gain"] == pytest.approx(-0.5)
    tiny.sample(streamed, "flux", 2)
    assert last_summary(streamed)["gain"] == pytest.approx(-0.5)
    budget(0.3 * size)
    tiny.sample(streamed, "flux", 2)
    assert last_summary(streamed)["gain"] is None


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
    tiny: Any, offload: Any, budget: Any, late: Any, where: str
) -> None:
    import comfy.model_management

    class Interrupted(late.LateDevice):
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


def test_memory_for_one_step_counts_what_conditioning_needs(tiny: Any, comfyui: Any) -> None:
    import comfy.sampler_helpers
    from leandit.host.residency import bytes_for_one_step

    model, _ = flux(tiny)
    shape = [1, 16, 512, 512]
    references = [torch.zeros(1, 16, 512, 512)] * 3
    conds = {"positive": [{"cross_attn": torch.zeros(1, 6, 64), "reference_latents": references}]}
    with_references = bytes_for_one_step(model, shape, conds)
    core = comfy.sampler_helpers.estimate_memory(model, shape, conds)[1]
    assert with_references == int(core + comfy.model_management.extra_reserved_memory())
    assert with_references > 2 * bytes_for_one_step(model, shape, None)


def test_half_a_module_is_never_bound(tiny: Any, offload: Any, budget: Any) -> None:
    """A bias that cannot be copied in one go keeps its whole module out of the stream."""
    model, size = flux(tiny)
    expected = tiny.sample(model, "flux")
    layer = model.model.diffusion_model.double_blocks[1].img_mlp[0]
    strided = torch.zeros(2 * layer.bias.numel())[::2]
    strided.copy_(layer.bias)
    layer.bias = torch.nn.Parameter(strided, requires_grad=False)
    budget(0.1 * size)
    streamed = offload(model, resident="0")
    assert error(tiny.sample(streamed, "flux"), expected) < 1e-6
    bytes_of_others = last_summary(streamed)["streamed_bytes_per_step"]
    assert bytes_of_others < last_summary(streamed)["block_bytes"] - layer.weight.nbytes + 10_000
