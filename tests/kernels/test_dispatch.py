"""Choosing, splitting, measuring and falling back, with backends that do as they are told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leandit.kernels.backend import LinearRequest, NoBackendError
from leandit.kernels.backends.dequantize import DequantizeBackend
from leandit.kernels.dispatch import (
    NEVER_SPLIT,
    Candidate,
    Dispatcher,
    LinearSettings,
    run_in_chunks,
)
from leandit.kernels.int8 import int8_linear, quantize_int8_rowwise
from leandit.kernels.linear_dispatch import backends
from leandit.kernels.row_split import RowSplit

N, K = 96, 256


class Scripted:
    """A backend that refuses or fails as told, and else computes as the reference does."""

    def __init__(self, name: str, refusal: str | None = None, error: Exception | None = None):
        self.name = name
        self.refusal = refusal
        self.error = error
        self.rows: list[int] = []

    def refuses(self, request: LinearRequest) -> str | None:
        return self.refusal

    def linear(self, x: Any, *arguments: Any) -> torch.Tensor:
        self.rows.append(x.shape[0])
        if self.error is not None:
            raise self.error
        return int8_linear(x, *arguments)


def operands(m: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> Any:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, K, generator=generator).to(dtype)
    q, scale = quantize_int8_rowwise(torch.randn(N, K, generator=generator))
    return x, q, scale, torch.randn(N, generator=generator).to(dtype) if bias else None, 64


def runnable() -> list[Any]:
    request = LinearRequest("cpu", torch.bfloat16, 64, N, K, 64)
    able = [backend for backend in backends(None) if backend.refuses(request) is None]
    return [backend for backend in able if backend.name not in NEVER_SPLIT]


MAX_ROWS = 48


@pytest.mark.parametrize("backend", runnable(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("m", [1, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS + 3])
def test_split_equals_unsplit_bit_for_bit(backend, dtype, bias, m) -> None:
    x, *rest = operands(m, dtype, bias)
    with torch.inference_mode():
        whole = run_in_chunks(Candidate(backend, m), x, *rest)
        split = run_in_chunks(Candidate(backend, MAX_ROWS), x, *rest)
    assert whole.dtype == dtype
    assert torch.equal(whole, split)


@pytest.mark.parametrize("backend", runnable(), ids=lambda backend: backend.name)
def test_split_equals_unsplit_on_a_wide_layer(backend) -> None:
    """Beyond the size at which BLAS and oneDNN change their kernels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2503, 2560, generator=generator).bfloat16()
    q, scale = quantize_int8_rowwise(torch.randn(640, 2560, generator=generator))
    with torch.inference_mode():
        whole = run_in_chunks(Candidate(backend, 2503), x, q, scale, None, 256)
        split = run_in_chunks(Candidate(backend, 600), x, q, scale, None, 256)
    assert torch.equal(whole, split)


@pytest.mark.parametrize("backend", runnable(), ids=lambda backend: backend.name)
def test_every_backend_is_as_exact_as_the_reference(backend) -> None:
    x, q, scale, bias, group = operands(64)
    from leandit.kernels.int8 import dequantize_int8

    weight = dequantize_int8(q, scale, group).double()
    exact = x.double() @ weight.T + bias.double()
    error = (backend.linear(x, q, scale, bias, group).double() - exact).norm()
    reference = (int8_linear(x, q, scale, bias, group).double() - exact).norm()
    assert error <= 1.05 * reference
    assert reference < 0.02 * exact.norm()


@pytest.mark.parametrize("name", ["empty", "three sides", "not contiguous"])
def test_inputs_of_every_form(name: str) -> None:
    x, *rest = operands(50)
    dispatcher = Dispatcher(LinearSettings(RowSplit("fixed", 16, 1)), backends(None))
    made = {
        "empty": x[:0],
        "three sides": x.reshape(2, 25, K),
        "not contiguous": x.t().contiguous().t(),
    }[name]
    expected = dispatcher.linear(made.contiguous().reshape(-1, K), *rest)
    out = dispatcher.linear(made, *rest)
    assert out.shape == (*made.shape[:-1], N)
    assert torch.equal(out.reshape(-1, N), expected)


def test_slices_are_views_and_the_result_is_one_tensor() -> None:
    backend = Scripted("a")
    seen: list[torch.Tensor] = []
    whole = backend.linear
    backend.linear = lambda x, *rest: (seen.append(x), whole(x, *rest))[1]  # type: ignore[method-assign]
    x, *rest = operands(100)
    run_in_chunks(Candidate(backend, 40), x, *rest)
    assert {part.untyped_storage().data_ptr() for part in seen} == {x.untyped_storage().data_ptr()}


def test_a_backend_that_fails_is_left_for_the_next_and_its_reason_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = Scripted("broken", error=RuntimeError("driver too old"))
    dispatcher = Dispatcher(LinearSettings(), [broken, Scripted("whole")])
    x, *rest = operands(20)
    with caplog.at_level(logging.WARNING):
        outs = [dispatcher.linear(x, *rest) for _ in range(3)]
    assert all(torch.equal(out, int8_linear(x, *rest)) for out in outs)
    assert broken.rows == [20]
    assert [record.getMessage() for record in caplog.records] == [
        "int8 linear: broken failed: RuntimeError: driver too old; the next backend takes over"
    ]
    assert dispatcher.failures == {"broken": "failed: RuntimeError: driver too old"}


def test_running_out_of_memory_is_not_swallowed() -> None:
    full = Scripted("full", error=torch.OutOfMemoryError("out of memory"))
    dispatcher = Dispatcher(LinearSettings(), [full, Scripted("next")])
    with pytest.raises(torch.OutOfMemoryError):
        dispatcher.linear(*operands(4))
    assert not dispatcher.failures


def test_when_nothing_can_run_every_reason_is_given() -> None:
    dispatcher = Dispatcher(LinearSettings(), [Scripted("a", "no card"), Scripted("b", "no sun")])
    with pytest.raises(NoBackendError, match=r"a: no card; b: no sun"):
        dispatcher.linear(*operands(4))


def test_asking_what_would_run_gives_the_reasons_where_nothing_would() -> None:
    request = LinearRequest("cpu", torch.bfloat16, 4, N, K, 64)
    with pytest.raises(NoBackendError, match="a: no card"):
        Dispatcher(LinearSettings(), [Scripted("a", "no card")]).decide(request)
    decision = Dispatcher(LinearSettings(), [Scripted("a", "no card"), Scripted("b")]).decide(
        request
    )
    assert (decision.candidate.name, decision.refusals) == ("b x 4", {"a": "no card"})


def test_a_layer_without_outputs_gives_none() -> None:
    x, q, scale, _, group = operands(4)
    backend = Scripted("a")
    out = Dispatcher(LinearSettings(), [backend]).linear(x, q[:0], scale[:0], None, group)
    assert out.shape == (4, 0) and backend.rows == []


def test_arguments_that_fail_everywhere_give_up_no_backend() -> None:
    both = [Scripted("a", error=KeyError("first")), Scripted("b", error=ValueError("second"))]
    dispatcher = Dispatcher(LinearSettings(), both)
    with pytest.raises(KeyError, match="first"):
        dispatcher.linear(*operands(4))
    for backend in both:
        backend.error = None
    assert dispatcher.linear(*operands(4)).shape == (4, N)
    assert not dispatcher.failures


@pytest.mark.parametrize("part", ["x", "scale", "bias"])
def test_operands_that_do_not_fit_are_named_before_any_backend_runs(part: str) -> None:
    x, q, scale, bias, group = operands(4)
    x = x[:, :128] if part == "x" else x
    scale = scale[:5] if part == "scale" else scale
    bias = bias[:5] if part == "bias" else bias
    backend = Scripted("a")
    with pytest.raises(ValueError, match="do not fit each other"):
        Dispatcher(LinearSettings(), [backend]).linear(x, q, scale, bias, group)
    assert backend.rows == []


def test_a_backend_that_cannot_even_be_asked_is_passed_over() -> None:
    broken = Scripted("broken")
    broken.refuses = lambda request: 1 / 0  # type: ignore[method-assign, return-value]
    dispatcher = Dispatcher(LinearSettings(), [broken, Scripted("whole")])
    assert dispatcher.linear(*operands(4)).shape == (4, N)
    request = LinearRequest("cpu", torch.bfloat16, 4, N, K, 64)
    assert "cannot be asked: ZeroDivisionError" in dispatcher.candidates(request)[1]["broken"]


def test_the_last_resort_runs_what_no_other_takes() -> None:
    x, q, scale, bias, group = operands(7)
    out = Dispatcher(LinearSettings(), [DequantizeBackend()]).linear(x, q, scale, bias, group)
    expected = int8_linear(x, q, scale, bias, group)
    assert (out.float() - expected.float()).norm() < 0.02 * expected.float().norm()


def test_an_inexact_integer_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's is on processors without VNNI."""
    from leandit.kernels import integer_product

    integer_product.why_inexact_on_cpu.cache_clear()
    exact = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: exact(a, b).clamp_max(2**22))
    try:
        request = LinearRequest("cpu", torch.bfloat16, 64, N, K, 64)
        able = [b.name for b in backends(None) if b.refuses(request) is None]
        assert able == ["dequantize"]
    finally:
        integer_product.why_inexact_on_cpu.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: error code 12"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    ],
    ids=repr,
)
def test_memory_that_runs_out_is_told_by_any_name(error: Exception) -> None:
    dispatcher = Dispatcher(LinearSettings(), [Scripted("a", error=error), Scripted("b")])
    with pytest.raises(type(error)):
        dispatcher.linear(*operands(4))
    assert not dispatcher.failures


def test_a_named_backend_goes_first_and_an_unknown_one_is_an_error() -> None:
    both = [Scripted("a"), Scripted("b")]
    dispatcher = Dispatcher(LinearSettings(backend="b"), both)
    dispatcher.linear(*operands(4))
    assert (both[0].rows, both[1].rows) == ([], [4])
    with pytest.raises(ValueError, match="unknown backend 'c'; valid: auto, a, b"):
        Dispatcher(LinearSettings(backend="c"), both)


def test_one_line_per_shape_class_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher = Dispatcher(LinearSettings(), [Scripted("a")])
    with caplog.at_level(logging.INFO):
        for m in (5, 8, 7, 9):
            dispatcher.linear(*operands(m))
    assert [record.getMessage() for record in caplog.records] == [
        f"int8 linear bfloat16 M<={m} N=96 K=256 G=64: a x {m} (preferred)" for m in (8, 16)
    ]


def test_verbose_adds_what_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    both = [Scripted("a", "no card"), Scripted("b")]
    with caplog.at_level(logging.INFO):
        Dispatcher(LinearSettings(verbose=True), both).linear(*operands(8))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "b x 8 (preferred)",
        "not a: no card",
    ]


def test_only_comfy_kitchen_is_split_by_its_own_configurations() -> None:
    dispatcher = Dispatcher(
        LinearSettings(RowSplit("auto", min_out_features=1)),
        [Scripted("comfy-kitchen"), Scripted("other")],
        selected_config=lambda m, n, k: 13 if m > 8192 else 0,
    )
    request = LinearRequest("cpu", torch.bfloat16, 32_700, N, K, 64)
    names = [candidate.name for candidate in dispatcher.candidates(request)[0]]
    assert names == ["comfy-kitchen x 8192", "comfy-kitchen x 32768", "other x 32768"]


class FakeClock:
    """Every piece of work takes the time it is told."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def milliseconds(self, work: Callable[[], object]) -> float:
        work()
        return self.times.pop(0)


def test_on_a_gpu_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from leandit.kernels import dispatch
    from leandit.kernels.tuner import Tuner

    monkeypatch.setattr(dispatch, "may_measure", lambda x: True)
    tuner = Tuner(FakeClock([3.0, 1.0]), "a card", None)
    slow, fast = Scripted("slow"), Scripted("fast")
    dispatcher = Dispatcher(LinearSettings(RowSplit("off")), [slow, fast], None, tuner)
    dispatcher.linear(*operands(8))
    dispatcher.linear(*operands(8))
    assert (len(slow.rows), len(fast.rows)) == (1, 3)
    (decision,) = dispatcher.decisions.values()
    assert decision.reason == "measured: slow x 8 3.000 ms, fast x 8 1.000 ms"


def test_on_a_gpu_a_named_backend_is_not_replaced_by_a_faster_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from leandit.kernels import dispatch
    from leandit.kernels.tuner import Tuner

    monkeypatch.setattr(dispatch, "may_measure", lambda x: True)
    tuner = Tuner(FakeClock([3.0, 1.0]), "a card", None)
    fast, named = Scripted("fast"), Scripted("named")
    settings = LinearSettings(RowSplit("off"), backend="named")
    Dispatcher(settings, [fast, named], None, tuner).linear(*operands(8))
    assert (fast.rows, named.rows) == ([], [8])


def test_on_a_gpu_a_candidate_that_fails_to_be_measured_is_given_up_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from leandit.kernels import dispatch
    from leandit.kernels.tuner import Tuner

    monkeypatch.setattr(dispatch, "may_measure", lambda x: True)
    broken = Scripted("broken", error=RuntimeError("NVRTC failed"))
    tuner = Tuner(FakeClock([3.0] * 4), "a card", None)
    dispatcher = Dispatcher(LinearSettings(RowSplit("off")), [Scripted("a"), broken], None, tuner)
    for m in (8, 30):
        dispatcher.linear(*operands(m))
    assert broken.rows == [8]
    assert dispatcher.failures == {"broken": "failed: RuntimeError: NVRTC failed"}
    assert len(caplog.records) == 1
