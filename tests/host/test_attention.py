"""The attention selector through ComfyUI's real attention wrapper, samplers and models."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from leandit.kernels.attention.request import AttentionRequest
from leandit.kernels.attention.schedule import Schedule, TauProfile, parse_layers
from leandit.kernels.attention.sdpa import Sdpa
from leandit.kernels.attention.select import AttentionSettings

pytestmark = pytest.mark.usefixtures("inference")


class StandIn(Sdpa):
    """Computes what SDPA computes, under another name; refuses and breaks as told."""

    def __init__(self, name: str, kind: Any = "exact", refusal: str | None = None) -> None:
        self.name = name
        self.kind = kind
        self.refusal = refusal
        self.error: Exception | None = None
        self.factor = 1.0
        self.calls: list[tuple[Any, ...]] = []

    def refuses(self, request: AttentionRequest) -> str | None:
        return self.refusal

    def attention(self, q: Any, k: Any, v: Any, mask: Any, scale: Any, options: Any) -> Any:
        self.calls.append((tuple(q.shape), tuple(k.shape), mask is not None, scale, options))
        if self.error is not None:
            raise self.error
        return super().attention(q, k, v, mask, scale, options) * self.factor


def selector(settings: AttentionSettings, previous: Any = None, **backends: StandIn) -> Any:
    from leandit.host.attention import AttentionSelector

    made = AttentionSelector(settings, previous)
    made._backends = {**made._backends, **backends}
    made.run.active = True
    return made


def call(override: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """ComfyUI's pytorch attention, with the override in the options, as models call it."""
    from comfy.ldm.modules.attention import get_attention_function

    options = {"optimized_attention_override": override} if override is not None else {}
    return get_attention_function("pytorch")(*args, transformer_options=options, **kwargs)


def operands(
    dim: int = 64, tokens: int = 50, keys: int = 50, heads: int = 4, kv: int = 4, four: bool = False
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dim + keys)
    parts = [
        torch.randn(2, count, length, dim, generator=generator)
        for count, length in ((heads, tokens), (kv, keys), (kv, keys))
    ]
    return parts if four else [part.transpose(1, 2).flatten(2) for part in parts]


MASKS = {
    "none": None,
    "rank 2, bool": torch.rand(50, 50) > 0.3,
    "rank 2, additive": torch.randn(50, 50),
    "rank 3, bool": torch.rand(2, 50, 50) > 0.3,
    "rank 3, additive": torch.randn(2, 50, 50),
    "rank 4, bool": torch.rand(2, 1, 50, 50) > 0.3,
    "rank 4, additive": torch.randn(2, 4, 50, 50),
}
for mask in MASKS.values():
    if mask is not None and mask.dtype == torch.bool:
        mask[..., 0] = True

CHOICES = ("sdpa", "fa", "keep", "sage_attn")


@pytest.mark.parametrize("dense", CHOICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positional", [True, False], ids=["positional", "keyword"])
def test_masks_of_every_form_reach_the_backend(dense: str, mask: str, positional: bool) -> None:
    """On a CPU `sage_attn` refuses, so `keep` runs; `fa` is a stand-in that takes masks."""
    override = selector(AttentionSettings(dense), fa=StandIn("fa"))
    args = (*operands(), 4)
    given = {"mask": MASKS[mask]}
    expected = call(None, *args, **given)
    found = call(override, *args, MASKS[mask]) if positional else call(override, *args, **given)
    assert torch.allclose(found, expected, atol=2e-6)
    if mask != "none" and dense == "fa":
        assert override._backends["fa"].calls[0][2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [40, 64, 72, 128, 160, 256, 512])
def test_heads_of_every_width(dim: int, dtype: torch.dtype) -> None:
    override = selector(AttentionSettings("fa"), fa=StandIn("fa"))
    args = [part.to(dtype) for part in operands(dim)]
    expected = call(None, *args, 4)
    found = call(override, *args, 4)
    assert found.dtype == dtype and found.shape == expected.shape
    bound = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert (found - expected).abs().max() <= bound


@pytest.mark.parametrize("out", [False, True], ids=["flat out", "four sides out"])
@pytest.mark.parametrize("four", [False, True], ids=["flat in", "four sides in"])
@pytest.mark.parametrize("kind", ["self", "cross", "grouped"])
def test_layouts_cross_attention_and_grouped_queries(kind: str, four: bool, out: bool) -> None:
    override = selector(AttentionSettings("fa"), fa=StandIn("fa"))
    changes = {"self": {}, "cross": {"keys": 20}, "grouped": {"kv": 2}}[kind]
    args = operands(four=four, **changes)
    flags = {"skip_reshape": four, "skip_output_reshape": out, "enable_gqa": kind == "grouped"}
    expected = call(None, *args, 4, **flags)
    found = call(override, *args, 4, **flags)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=2e-6)
    (shapes,) = [seen[:2] for seen in override._backends["fa"].calls]
    kv_heads, keys = (2 if kind == "grouped" else 4), (20 if kind == "cross" else 50)
    assert shapes == ((2, 4, 50, 64), (2, kv_heads, keys, 64))


def test_the_scale_reaches_the_backend() -> None:
    override = selector(AttentionSettings("fa"), fa=StandIn("fa"))
    expected = call(None, *operands(), 4, scale=0.3)
    assert torch.allclose(call(override, *operands(), 4, scale=0.3), expected, atol=2e-6)


def test_containers_arrive_as_tensors() -> None:
    from comfy.ldm.modules.attention import AttentionTensorContainer

    override = selector(AttentionSettings("fa"), fa=StandIn("fa"))
    boxes = [AttentionTensorContainer(part) for part in operands()]
    assert torch.allclose(call(override, *boxes, 4), call(None, *operands(), 4), atol=2e-6)
    assert len(override._backends["fa"].calls) == 1


@pytest.mark.parametrize("kind", ["quantized", "sparse"])
def test_where_the_model_asks_for_exact_attention_no_other_runs(kind: str) -> None:
    from leandit.kernels.attention.kitchen_int8 import KitchenInt8
    from leandit.kernels.attention.sage_attn import SageAttention
    from leandit.kernels.attention.sol_attn import SolAttention

    name = "sage_attn" if kind == "quantized" else "sol_attn"
    settings = AttentionSettings(
        dense=name if kind == "quantized" else "keep",
        sparse=name if kind == "sparse" else "none",
        schedule=Schedule(min_tokens=0),
    )
    override = selector(settings)
    expected = call(None, *operands(128), 4)
    found = call(override, *operands(128), 4, low_precision_attention=False)
    assert torch.equal(found, expected)
    request = AttentionRequest(
        "cuda", (8, 9), torch.bfloat16, 1, 4, 4, 50, 50, 128, exact_only=True
    )
    for backend in (KitchenInt8(), SageAttention(), SolAttention()):
        assert backend.refuses(request) == "the model asks for exact attention here"


def test_keep_goes_on_with_the_override_that_was_there() -> None:
    seen: list[str] = []

    def other(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert kwargs["_inside_attn_wrapper"]
        seen.append("other")
        return func(*args, **kwargs)

    override = selector(AttentionSettings("keep"), previous=other)
    assert torch.equal(call(override, *operands(), 4), call(None, *operands(), 4))
    assert seen == ["other"]


def test_a_refusal_is_said_once_and_the_kept_attention_runs(caplog: Any) -> None:
    override = selector(AttentionSettings("sage_attn"))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            call(override, *operands(), 4)
    assert [record.getMessage() for record in caplog.records] == [
        "attention: sage_attn: needs an NVIDIA card, the tensors are on cpu; another one runs"
    ]


def test_strict_refuses_in_words() -> None:
    from leandit.host.errors import HostError

    override = selector(AttentionSettings("sage_attn", strict=True))
    with pytest.raises(HostError, match="sage_attn: needs an NVIDIA card"):
        call(override, *operands(), 4)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", "not finite"),
        ("scaled", "relative error 1.0"),
        ("raises", "RuntimeError: no kernel"),
    ],
)
def test_a_broken_backend_is_dropped_for_the_run(fault: str, words: str, caplog: Any) -> None:
    backend = StandIn("fa")
    backend.factor = {"nan": float("nan"), "scaled": 2.0}.get(fault, 1.0)
    backend.error = RuntimeError("no kernel image") if fault == "raises" else None
    override = selector(AttentionSettings("fa"), fa=backend)
    for _ in range(3):
        found = call(override, *operands(), 4)
        assert torch.allclose(found, call(None, *operands(), 4), atol=2e-6)
    assert len(backend.calls) == 1
    assert words in override.run.log.dropped["fa"]
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


def test_the_check_may_only_report() -> None:
    backend = StandIn("fa")
    backend.factor = 2.0
    override = selector(AttentionSettings("fa", check="report"), fa=backend)
    call(override, *operands(), 4)
    call(override, *operands(), 4)
    assert len(backend.calls) == 2 and not override.run.log.dropped
    assert "relative error 1.0" in str(override.run.log.quality)


def test_values_a_kernel_cannot_take_are_refused_for_that_call_only() -> None:
    from leandit.host.errors import HostError
    from leandit.kernels.attention.contract import ValueRefusal

    backend = StandIn("fa")
    backend.error = ValueRefusal("too large")
    override = selector(AttentionSettings("fa"), fa=backend)
    assert torch.allclose(call(override, *operands(), 4), call(None, *operands(), 4), atol=2e-6)
    backend.error = None
    call(override, *operands(), 4)
    assert override.run.log.calls == {("keep", "fa: too large"): 1, ("fa", ""): 1}
    backend.error = ValueRefusal("too large")
    with pytest.raises(HostError, match="fa: too large"):
        call(selector(AttentionSettings("fa", strict=True), fa=backend), *operands(), 4)


def test_a_models_own_nan_is_not_blamed_on_the_kernel() -> None:
    override = selector(AttentionSettings("fa"), fa=StandIn("fa"))
    q, k, v = operands()
    call(override, q * float("nan"), k, v, 4)
    assert not override.run.log.dropped
    assert "cannot be judged" in str(override.run.log.quality)


def test_cross_attention_is_dense_and_no_refusal_even_where_those_stop_the_run() -> None:
    settings = AttentionSettings(
        "keep", "sol_attn", Schedule(0.0, min_tokens=0), strict=True, check="off"
    )
    override = selector(settings)
    call(override, *operands(128, 300, 20), 4)
    call(override, *operands(128, 300, 300), 4, low_precision_attention=False)
    assert [reason for _, reason in override.run.log.calls] == [
        "cross-attention",
        "the model asks for exact attention",
    ]


def test_a_black_result_of_sparse_attention_is_broken() -> None:
    backend = StandIn("sol_attn", "sparse")
    backend.factor = 0.0
    settings = AttentionSettings("keep", "sol_attn", Schedule(0.0, min_tokens=0))
    override = selector(settings, sol_attn=backend)
    assert torch.allclose(call(override, *operands(), 4), call(None, *operands(), 4), atol=2e-6)
    assert "relative error 1.0" in override.run.log.dropped["sol_attn"]


def test_running_out_of_memory_is_not_swallowed() -> None:
    backend = StandIn("fa")
    backend.error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError):
        call(selector(AttentionSettings("fa"), fa=backend), *operands(), 4)


# Whole models and samplers


def selected(model: Any, settings: AttentionSettings, **backends: StandIn) -> tuple[Any, Any]:
    from leandit.host.attention import OVERRIDE, select_attention

    clone = select_attention(model, settings)
    chosen = clone.model_options["transformer_options"][OVERRIDE]
    chosen._backends = {**chosen._backends, **backends}
    return clone, chosen


def sparse_settings(**schedule: Any) -> AttentionSettings:
    return AttentionSettings(
        dense="keep",
        sparse="sol_attn",
        schedule=Schedule(**{"start_percent": 0.0, "min_tokens": 0, **schedule}),
        check="off",
    )


@pytest.mark.parametrize("family", ["flux", "wan", "qwen_image", "minimax_h3", "z_image"])
def test_every_call_of_a_model_is_seen_and_its_layers_are_numbered(tiny: Any, family: str) -> None:
    model = tiny.build(family)
    plain = tiny.sample(model, family)
    stand_in = StandIn("sol_attn", "sparse")
    clone, chosen = selected(model, sparse_settings(), sol_attn=stand_in)
    found = tiny.sample(clone, family)
    log = chosen.last_log
    assert sum(entry["count"] for entry in log["calls"]) >= 4
    layers = log["layers"]["sol_attn"]
    assert layers == list(range(len(layers))) and len(layers) >= 2
    assert log["steps"]["sol_attn"] == [0, 1]
    assert (found - plain).norm() < 1e-4 * plain.norm()
    # The model itself, and what runs after, is untouched.
    assert torch.equal(tiny.sample(model, family), plain)
    assert not chosen.run.log.calls


SINKS = {"flux": (0, 6), "qwen_image": (0, 6), "minimax_h3": None, "krea2": None}


@pytest.mark.parametrize("family", SINKS)
def test_text_before_the_picture_is_a_sink(tiny: Any, family: str) -> None:
    stand_in = StandIn("sol_attn", "sparse")
    clone, _ = selected(tiny.build(family), sparse_settings(), sol_attn=stand_in)
    tiny.sample(clone, family)
    sinks = {options.sinks for _, _, _, _, options in stand_in.calls}
    text = tiny.inputs(family, 1).positive[0][0].shape[1]
    # Text refiners, which run before, have no picture and no sinks.
    ((first, last),) = next(iter(sinks - {()}))
    assert len(sinks - {()}) == 1
    assert first == 0 and last >= text > 0
    assert SINKS[family] is None or (first, last) == (0, text)


def test_a_compiled_model_does_not_recompile_in_every_step(tiny: Any) -> None:
    import torch._dynamo.testing
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    clone, _ = selected(tiny.build("flux"), AttentionSettings("keep"))
    set_torch_compile_wrapper(clone, backend=counter, options=None, mode=None)
    tiny.sample(clone, "flux", steps=4)
    early = counter.frame_count
    tiny.sample(clone, "flux", steps=16)
    assert counter.frame_count < early + 6
    torch._dynamo.reset()


def test_another_nodes_attention_after_ours_is_said(tiny: Any) -> None:
    from comfy.ldm.modules.attention import get_attention_function

    clone, chosen = selected(tiny.build("flux"), AttentionSettings("keep"))
    clone.set_model_optimized_attention(get_attention_function("pytorch"))
    tiny.sample(clone, "flux")
    assert "Another node has set its own attention" in chosen.last_report


def test_an_inner_selector_keeps_out(tiny: Any) -> None:
    from leandit.host.attention import OVERRIDE, select_attention

    inner = select_attention(tiny.build("flux"), AttentionSettings("sdpa"))
    ours = inner.model_options["transformer_options"][OVERRIDE]

    def foreign(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return ours(func, *args, **kwargs)

    inner.model_options["transformer_options"][OVERRIDE] = foreign
    outer = select_attention(inner, AttentionSettings("keep"))
    tiny.sample(outer, "flux")
    assert not ours.run.log.calls and not ours.last_report


def test_all_set_to_sdpa_changes_no_bit(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside ComfyUI's own choice of the same function."""
    from comfy.ldm.modules.attention import get_attention_function

    model = tiny.build("flux")
    core = model.clone()
    core.set_model_optimized_attention(get_attention_function("pytorch"))
    ours, _ = selected(model, AttentionSettings("sdpa"))
    assert torch.equal(tiny.sample(ours, "flux"), tiny.sample(core, "flux"))


def test_a_unets_layers_are_numbered_through(comfyui: Any) -> None:
    import comfy.model_patcher
    import comfy.sample
    import comfy.supported_models

    config = {
        "image_model": None, "image_size": 32, "in_channels": 4, "out_channels": 4,
        "model_channels": 32, "num_res_blocks": [1, 1], "channel_mult": [1, 2],
        "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1],
        "transformer_depth_middle": 1, "context_dim": 64, "num_heads": 4,
        "use_spatial_transformer": True, "use_linear_in_transformer": False,
        "adm_in_channels": None, "legacy": False,
    }  # fmt: skip
    del config["image_model"]
    model_config = comfy.supported_models.SD15(config)
    model_config.set_inference_dtype(torch.float32, None)
    cpu = torch.device("cpu")
    model = model_config.get_model({}, "", device=cpu)
    stand_in = StandIn("sol_attn", "sparse")
    clone, chosen = selected(
        comfy.model_patcher.ModelPatcher(model, cpu, cpu), sparse_settings(), sol_attn=stand_in
    )
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    words = [[torch.randn(1, 7, 64), {}]]
    comfy.sample.sample(
        clone, noise, 2, 1.0, "euler", "simple", words, words, noise * 0, disable_pbar=True, seed=1
    )
    log = chosen.last_log
    layers = log["layers"]["sol_attn"]
    assert len(layers) == 7 and layers == list(range(7))
    by_reason = {entry["reason"]: entry["count"] for entry in log["calls"]}
    assert by_reason == {"": 7 * 2, "cross-attention": 7 * 2}


def run_sampler(
    tiny: Any, model: Any, sampler: str, steps: int, first: int | None = None, last: int | None = None,
    denoise: float = 1.0,
) -> None:  # fmt: skip
    import comfy.sample

    given = tiny.inputs("flux", 1)
    comfy.sample.sample(
        model, given.noise, steps, 1.0, sampler, "simple", given.positive, given.positive,
        given.noise * 0, disable_pbar=True, seed=1, start_step=first, last_step=last,
        denoise=denoise, force_full_denoise=False,
    )  # fmt: skip


EVALUATIONS = {
    ("euler", 4): [0, 1, 2, 3],
    ("heun", 4): [0, 1, 1, 2, 2, 3, 3],
    ("res_multistep", 4): [0, 1, 2, 3],
}
"""The step of each model call. heun's second look at a step is at the noise level of the next."""


@pytest.mark.parametrize(("sampler", "steps"), EVALUATIONS)
def test_the_first_steps_are_dense_whatever_the_sampler(
    tiny: Any, sampler: str, steps: int
) -> None:
    stand_in = StandIn("sol_attn", "sparse")
    clone, chosen = selected(tiny.build("flux"), sparse_settings(dense_steps=2), sol_attn=stand_in)
    run_sampler(tiny, clone, sampler, steps)
    evaluations = EVALUATIONS[sampler, steps]
    counts = {entry["reason"]: entry["count"] for entry in chosen.last_log["calls"]}
    per_call = (counts["first 2 steps"] + counts[""]) // len(evaluations)
    assert counts["first 2 steps"] == per_call * sum(step < 2 for step in evaluations)
    assert counts[""] == per_call * sum(step >= 2 for step in evaluations)
    assert chosen.last_log["steps"]["sol_attn"] == sorted({s for s in evaluations if s >= 2})


def test_noise_added_by_the_sampler_does_not_set_the_step_back(tiny: Any) -> None:
    from leandit.host.attention_run import AttentionRun

    run = AttentionRun(active=True)
    steps = []
    options = {"sample_sigmas": torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])}
    for sigma in (1.0, 0.9, 0.97, 0.72, 0.85, 0.45):
        run.begin_model_call(options, torch.tensor([sigma]), None, Schedule())
        steps.append(run.place.moment.step)
    assert steps == [0, 1, 1, 2, 2, 3]


def test_a_sampler_between_the_levels_is_dense_within_the_first_steps(tiny: Any) -> None:
    stand_in = StandIn("sol_attn", "sparse")
    clone, chosen = selected(tiny.build("flux"), sparse_settings(dense_steps=2), sol_attn=stand_in)
    run_sampler(tiny, clone, "dpmpp_sde", 4)
    assert chosen.last_log["steps"]["keep"] == [0, 1]
    assert chosen.last_log["steps"]["sol_attn"] == [2, 3]


@pytest.mark.parametrize(
    ("given", "steps"),
    [({"first": 5, "last": 12}, 7), ({"denoise": 0.4}, 20)],
    ids=["KSamplerAdvanced 5 to 12 of 20", "denoise 0.4"],
)
def test_steps_count_within_the_run(tiny: Any, given: dict[str, Any], steps: int) -> None:
    stand_in = StandIn("sol_attn", "sparse")
    clone, chosen = selected(tiny.build("flux"), sparse_settings(dense_steps=3), sol_attn=stand_in)
    run_sampler(tiny, clone, "euler", 20, **given)
    assert chosen.last_log["steps"]["keep"] == [0, 1, 2]
    assert chosen.last_log["steps"]["sol_attn"] == list(range(3, steps))


def test_the_window_is_by_noise_so_a_late_part_of_a_run_is_sparse_at_once(tiny: Any) -> None:
    settings = sparse_settings(start_percent=0.5)
    stand_in = StandIn("sol_attn", "sparse")
    model = tiny.build("flux")
    clone, chosen = selected(model, settings, sol_attn=stand_in)
    run_sampler(tiny, clone, "euler", 20)
    reasons = {entry["reason"] for entry in chosen.last_log["calls"]}
    assert reasons == {"before 50%", ""}
    run_sampler(tiny, clone, "euler", 20, denoise=0.2)
    assert {entry["reason"] for entry in chosen.last_log["calls"]} == {""}


def test_layers_from_both_ends_are_dense(tiny: Any) -> None:
    stand_in = StandIn("sol_attn", "sparse")
    settings = sparse_settings(dense_layers=parse_layers("0,-1"))
    clone, chosen = selected(tiny.build("flux"), settings, sol_attn=stand_in)
    tiny.sample(clone, "flux", steps=3)
    total = len(set(chosen.last_log["layers"]["keep"]) | set(chosen.last_log["layers"]["sol_attn"]))
    # The number of layers is known from the second call of the model on.
    assert {0, total - 1} <= set(chosen.last_log["layers"]["keep"])
    by_reason = {entry["reason"]: entry["count"] for entry in chosen.last_log["calls"]}
    assert by_reason["layers 0,-1"] == 3 + 2


def test_two_selectors_do_not_nest_and_a_foreign_override_goes_on_acting(tiny: Any) -> None:
    from leandit.host.attention import OVERRIDE, select_attention

    model = tiny.build("flux").clone()
    calls: list[int] = []

    def foreign(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return func(*args, **kwargs)

    model.model_options.setdefault("transformer_options", {})[OVERRIDE] = foreign
    once = select_attention(model, AttentionSettings("keep"))
    twice = select_attention(once, AttentionSettings("keep"))
    chosen = twice.model_options["transformer_options"][OVERRIDE]
    assert chosen.previous is foreign
    tiny.sample(twice, "flux")
    assert len(calls) == sum(entry["count"] for entry in chosen.last_log["calls"]) > 0
    assert not once.model_options["transformer_options"][OVERRIDE].last_report


def test_an_interrupt_ends_the_run_with_a_report_and_leaves_nothing(tiny: Any) -> None:
    import comfy.model_management

    class Cancels(StandIn):
        def attention(self, *args: Any) -> Any:
            comfy.model_management.interrupt_current_processing()
            comfy.model_management.throw_exception_if_processing_interrupted()

    clone, chosen = selected(tiny.build("flux"), sparse_settings(), sol_attn=Cancels("sol_attn"))
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        tiny.sample(clone, "flux")
    assert "attention: 0 calls" in chosen.last_report
    assert not chosen.run.log.calls and not chosen.run.log.dropped


def test_a_model_that_never_asks_is_reported(tiny: Any) -> None:
    from leandit.quant.attention_report import AttentionLog

    assert "0 calls seen" in AttentionLog().text()


def test_real_sol_attention_runs_on_a_cpu_and_sees_everything_at_a_low_tau(tiny: Any) -> None:
    settings = AttentionSettings(
        "keep", "sol_attn", Schedule(0.0, min_tokens=0), TauProfile(-100.0)
    )
    override = selector(settings)
    expected = call(None, *operands(128, 300, 300), 4)
    found = call(override, *operands(128, 300, 300), 4)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert override.run.log.calls == {("sol_attn", ""): 1}
