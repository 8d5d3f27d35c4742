"""Choosing the attention kernel per model, layer and step, by ComfyUI's override of attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.ldm.modules.attention import get_attention_function
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ..kernels.attention.backends import attention_backends
from ..kernels.attention.contract import SparseOptions, ValueRefusal
from ..kernels.attention.quality import measure_quality
from ..kernels.attention.request import AttentionRequest, request_of
from ..kernels.attention.select import KEEP, AttentionSettings, select
from ..kernels.out_of_memory import is_out_of_memory
from ..quant.report import Report
from .attention_call import AttentionCall, Override, read_call
from .attention_run import AttentionRun
from .conditioning_tokens import conditioning_tokens, named_by_the_options
from .errors import HostError
from .quantize import compute_dtype

logger = logging.getLogger(__name__)

OVERRIDE = "optimized_attention_override"
KEY = "leandit.attention"
NO_KERNEL = ("auto", KEEP, "none")
Show = Callable[[str], None]


class AttentionSelector:
    """The override: ComfyUI calls it in place of its attention function.

    It has no attribute `container_function` on purpose: ComfyUI then hands over plain tensors.
    """

    def __init__(
        self, settings: AttentionSettings, previous: Override | None, show: Show | None = None
    ) -> None:
        self.settings = settings
        self.previous = previous
        self.run = AttentionRun()
        self.last_report = ""
        self.last_log: dict[str, Any] = {}
        self._backends = attention_backends()
        self._show = show

    @torch.compiler.disable
    def __call__(self, func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attention by the backend that the settings, the step and the layer ask for.

        Outside of a sampling run it keeps out: another selector wrapped around it has taken over.
        """
        call = read_call(args, kwargs) if self.run.active else None
        if call is None:
            if self.run.active:
                self.run.log.count(KEEP, "operands of a form that is not known", "", None, None)
            return self._keep(func, args, kwargs)
        request = request_of(call.q, call.k, call.v, call.mask, call.scale, call.exact_only)
        main = request.is_self_attention and request.tokens >= self.settings.schedule.min_tokens
        layer = self.run.layer_of(call.transformer_options, main)
        place = self.run.place
        refused: dict[str, str] = {}
        while True:
            dropped = {**self.run.log.dropped, **refused}
            choice = select(
                self.settings, request, place.moment, layer, place.layers, self._backends, dropped
            )
            if choice.refused:
                self._refused(choice.reason)
            if choice.backend == KEEP:
                out = self._keep(func, args, kwargs)
            elif choice.backend == "sdpa":
                out = get_attention_function("pytorch")(*args, **kwargs)
            else:
                try:
                    out = self._attempt(choice.backend, call, request, layer)
                except ValueRefusal as error:  # of these values only
                    refused[choice.backend] = str(error)
                    continue
            if out is not None:
                step = place.moment.step
                self.run.log.count(choice.backend, choice.reason, request.shape, step, layer)
                return out

    def _keep(self, func: Override, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """What would have run without this node."""
        if self.previous is not None:
            return self.previous(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _attempt(
        self, name: str, call: AttentionCall, request: AttentionRequest, layer: int | None
    ) -> torch.Tensor | None:
        """The result in the caller's form, or None where the backend is given up for this run."""
        backend = self._backends[name]
        tau = self.settings.tau.of(layer, self.run.place.layers)
        options = SparseOptions(tau, self._sinks(call, request.tokens), self.settings.keep)
        try:
            out = backend.attention(call.q, call.k, call.v, call.mask, call.scale, options)
        except (comfy.model_management.InterruptProcessingException, ValueRefusal):
            raise
        except Exception as error:  # a kernel of another package
            if is_out_of_memory(error) or self.settings.strict:
                raise
            self._drop(name, f"{type(error).__name__}: {error}")
            return None
        if self.settings.check != "off" and self._is_broken(name, call, request, out):
            return None
        return call.output(out)

    def _is_broken(
        self, name: str, call: AttentionCall, request: AttentionRequest, out: torch.Tensor
    ) -> bool:
        """Check a backend's first result of each kind; drops one whose result cannot be used."""
        what = f"{name}, {request.shape}" + ("" if request.mask == "none" else ", masked")
        if (name, what) in self.run.checked:
            return False
        self.run.checked.add((name, what))
        kind = self._backends[name].kind
        try:
            quality = measure_quality(out, call.q, call.k, call.v, call.mask, call.scale, kind)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.run.log.quality[what] = "not checked: memory ran out"
            return False
        self.run.log.quality[what] = str(quality)
        if not quality.broken or self.settings.check != "fallback":
            return False
        if self.settings.strict:
            raise HostError(f"attention {what} is broken: {quality}")
        self._drop(name, f"broken on {what}: {quality}")
        return True

    def _sinks(self, call: AttentionCall, tokens: int) -> tuple[tuple[int, int], ...]:
        """Conditioning tokens that every query is to see exactly."""
        if self.settings.sink_tokens >= 0:
            count = min(self.settings.sink_tokens, tokens)
            return ((0, count),) if count else ()
        ranges = named_by_the_options(call.transformer_options) or self.run.place.sinks
        return tuple((first, min(last, tokens)) for first, last in ranges if first < tokens)

    def _refused(self, reason: str) -> None:
        if self.settings.strict:
            raise HostError(
                f"attention: {reason}. Set on_unsupported to fallback, or choose another backend"
            )
        if self.run.first_time(reason):
            logger.info("attention: %s; another one runs", reason)

    def _drop(self, name: str, reason: str) -> None:
        self.run.log.dropped[name] = reason
        logger.warning("attention: %s is given up for this run: %s", name, reason)

    def _is_reached_from(self, override: Any) -> bool:
        """Whether the override that runs is this one, or may call it: it is not ComfyUI's plain one."""
        plain = getattr(override, "__module__", "").startswith("comfy.model_patcher")
        return override is self or (override is not None and not plain)

    def sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps a whole sampling run: a fresh state before, the report after, however it ends."""
        self.run = AttentionRun(active=True)
        try:
            return executor(*args, **kwargs)
        finally:
            self.last_report = self.run.log.text()
            self.last_log = self.run.log.as_json()
            self.run = AttentionRun()
            logger.info("%s", self.last_report)
            if self._show is not None:
                self._show(self.last_report)

    def model_call(self, executor: Any, x: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps one call of the model: notes step and noise level."""
        options = next((a for a in args if isinstance(a, dict) and "sample_sigmas" in a), None)
        options = kwargs.get("transformer_options") or options or {}
        sampling = getattr(executor.class_obj, "model_sampling", None)
        self.run.begin_model_call(options, t, sampling, self.settings.schedule)
        context = kwargs.get("c_crossattn", args[1] if len(args) > 1 else None)
        self.run.place.sinks = conditioning_tokens(executor.class_obj, context, kwargs)
        self.run.log.replaced = not self._is_reached_from(options.get(OVERRIDE))
        return executor(x, t, *args, **kwargs)


def select_attention(
    model: ModelPatcher, settings: AttentionSettings, show: Show | None = None
) -> ModelPatcher:
    """A clone of `model` whose attention is chosen by the settings.

    An override that is there already goes on acting where ours keeps out; one of ours is replaced.
    """
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    previous = options.get(OVERRIDE)
    if isinstance(previous, AttentionSelector):
        previous = previous.previous
    selector = AttentionSelector(settings, previous, show)
    options[OVERRIDE] = selector
    for kind, wrapper in (
        (WrappersMP.OUTER_SAMPLE, selector.sample),
        (WrappersMP.APPLY_MODEL, selector.model_call),
    ):
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone


def attention_report(model: ModelPatcher, settings: AttentionSettings) -> Report:
    """What is set, and what would refuse self-attention of this machine's and model's kind."""
    device = model.load_device
    on_card = device.type == "cuda"
    request = AttentionRequest(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if on_card else None,
        dtype=compute_dtype(model),
        batch=1,
        heads=24,
        kv_heads=24,
        tokens=settings.schedule.min_tokens or 1024,
        key_tokens=settings.schedule.min_tokens or 1024,
        head_dim=128,
    )
    wished = [name for name in (settings.dense, settings.sparse) if name not in NO_KERNEL]
    refusals = {
        name: reason
        for name, backend in attention_backends().items()
        if (reason := backend.refuses(request)) is not None
    }
    schedule = settings.schedule
    lines = [f"attention: dense {settings.dense}, sparse {settings.sparse}"]
    if settings.sparse != "none":
        lines.append(
            f"  sparse from {schedule.start_percent:.0%} to {schedule.end_percent:.0%}, after "
            f"{max(schedule.dense_steps, 0)} dense steps, from {schedule.min_tokens} tokens on, dense "
            f"layers: {schedule.dense_layers.text or 'none'}"
        )
    lines += [f"cannot run here, {name}: {reason}" for name, reason in refusals.items()]
    notes = tuple(
        f"{name} was asked for and cannot run here: {refusals[name]}"
        for name in wished
        if name in refusals
    )
    summary = {
        "dense": settings.dense,
        "sparse": settings.sparse,
        "start_percent": schedule.start_percent,
        "end_percent": schedule.end_percent,
        "dense_steps": schedule.dense_steps,
        "dense_layers": schedule.dense_layers.text,
        "min_tokens": schedule.min_tokens,
        "tau": settings.tau.base,
        "refusals": refusals,
    }
    text = "\n".join([*lines, *(f"note: {note}" for note in notes)])
    return Report("LeanDiTAttention", summary, (), notes, text)
