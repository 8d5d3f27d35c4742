"""Models under torch.compile: blocks stream, whole graphs are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_device import streams, timed
from offload_cases import PROJECTIONS, error, flux, last_summary, on_card, with_lora, wrapper_of

pytestmark = pytest.mark.usefixtures("inference")


def test_blocks_compiled_one_by_one_stream(tiny: Any, offload: Any) -> None:
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
    assert len(set(streams()[-1].copies)) == 3
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


@pytest.mark.parametrize(
    ("resident", "seconds"),
    [("2", 0.5), ("2", 1.5), ("auto", 1.5)],
    ids=["it pays", "it does not", "it does not, as ComfyUI chooses"],
)
def test_blocks_compiled_one_by_one_keep_their_loras(
    tiny: Any, offload: Any, budget: Any, spare: Any, resident: str, seconds: float
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
    streamed = offload(patched, device=timed(seconds), mode="auto", resident=resident)
    keys = ["diffusion_model.double_blocks.0", "diffusion_model.double_blocks.1"]
    set_torch_compile_wrapper(streamed, backend="eager", options=None, mode=None, keys=keys)
    for _ in range(2):
        assert error(tiny.sample(streamed, "flux", 8), expected) < 1e-6
    assert last_summary(streamed)["streaming"] is (seconds < 1)
    assert error(tiny.sample(patched, "flux", 8), expected) < 1e-6
    assert error(tiny.sample(model, "flux", 8), plain) < 1e-6
    torch._dynamo.reset()


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
