"""Mode auto: it measures, keeps what pays, and gives everything back otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_device import LateDevice, streams, timed
from offload_cases import (
    PROJECTIONS,
    error,
    flux,
    last_summary,
    longer,
    on_card,
    patched_twice,
    with_lora,
    wrapper_of,
)

pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize(
    ("without", "streaming", "stays"),
    [(1.0, 0.7, True), (1.0, 0.99, False), (1.0, 1.5, False)],
    ids=["a gain of 30 percent", "a gain of 1 percent", "a loss"],
)
def test_auto_measures_and_keeps_what_pays(
    tiny: Any, offload: Any, without: float, streaming: float, stays: bool
) -> None:
    model = longer(tiny, "wan")
    expected = tiny.sample(model, "wan", 9)
    streamed = offload(model, device=timed(streaming), mode="auto")
    assert torch.equal(tiny.sample(streamed, "wan", 9), expected)
    summary = wrapper_of(streamed).last_report.summary
    assert summary["gain"] == pytest.approx(1 - streaming / without)
    assert summary["streaming"] is stays
    moving = [b for b in streams()[-1].blocks if b.nbytes]
    copies = len(streams()[-1].copies)
    # Three forwards without, three with, and three more where it stays on.
    assert copies <= len(moving) * (6 if stays else 3) + 2
    assert copies >= len(moving) * (6 if stays else 3) - 2
    # The next run remembers.
    LateDevice.made.clear()
    tiny.sample(streamed, "wan", 2)
    assert bool(streams()) is stays
    assert wrapper_of(streamed).last_report.summary["streaming"] is stays


@pytest.mark.parametrize("keys", [(), PROJECTIONS], ids=["no LoRA", "a LoRA"])
@pytest.mark.parametrize(("share", "room"), [(0.6, 0), (0.4, 4_000_000), (0.6, 8_000_000)])
@pytest.mark.parametrize("resident", ["auto", "2"])
def test_auto_that_switches_itself_off_gives_the_memory_back(
    tiny: Any,
    offload: Any,
    budget: Any,
    spare: Any,
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

    streamed = offload(model, device=timed(1.5), mode="auto", resident=resident)
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


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize("resident", ["auto", "2"])
@pytest.mark.usefixtures("nearly_full")
def test_buffers_that_do_not_fit_cost_nothing(
    tiny: Any, offload: Any, budget: Any, resident: str, mode: str
) -> None:
    from comfy.patcher_extension import WrappersMP

    class Full(timed(1.0)):  # type: ignore[misc]  # a class that is made
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


def test_a_decision_does_not_hold_for_another_share_on_the_card(
    tiny: Any, offload: Any, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leandit.host import offload as module

    monkeypatch.setattr(module, "RESIDENCY_STEP", 1_000_000)
    model, size = flux(tiny)
    streamed = offload(model, device=timed(1.5), mode="auto", resident="auto")
    budget(0.9 * size)
    tiny.sample(streamed, "flux", 7)
    assert last_summary(streamed)["gain"] == pytest.approx(-0.5)
    tiny.sample(streamed, "flux", 2)
    assert last_summary(streamed)["gain"] == pytest.approx(-0.5)
    budget(0.3 * size)
    tiny.sample(streamed, "flux", 2)
    assert last_summary(streamed)["gain"] is None
