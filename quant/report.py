"""What was done, what was not, and why: one value, shown as text and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..kernels.backends.kitchen import Route
from .plan import Decision, Plan, Quantize
from .settings import QuantSettings

WORST_LAYERS = 5


@dataclass(frozen=True)
class LayerResult:
    """Size of a quantized weight in bytes and its signal-to-noise ratio in dB."""

    nbytes: int
    sqnr_db: float


@dataclass(frozen=True)
class Report:
    """A node's report. `as_json` is its public form: node, summary, layers, notes."""

    node: str
    summary: dict[str, Any]
    layers: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    text: str

    def with_note(self, note: str) -> Report:
        """The same report with one more note."""
        return replace(self, notes=(*self.notes, note), text=f"{self.text}\nnote: {note}")

    def as_json(self) -> dict[str, Any]:
        """Plain data, free of infinities: a ratio in dB is None where the result is exact."""
        return {
            "node": self.node,
            "summary": self.summary,
            "layers": list(self.layers),
            "notes": list(self.notes),
        }


def plain_report(node: str, sentence: str) -> Report:
    """A report of one sentence, for a node that has nothing to do."""
    return Report(node, {}, (), (sentence,), sentence)


def quantize_report(
    node: str,
    plan: Plan,
    results: Mapping[str, LayerResult],
    settings: QuantSettings,
    model_bytes: tuple[int, int],
    route: Route | None,
    device: str,
    baked: int,
    seconds: float,
    cache: str = "memory",
) -> Report:
    """The report of a quantization.

    Args:
        results: per selected layer. model_bytes: the whole model before and after.
        route: the kernels that will run the largest layer. baked: weights with LoRAs merged in.
        cache: "memory"; "hit", "written" or "rewritten" where the weights are on the disk.
    """
    ratios = {name: result.sqnr_db for name, result in results.items()}
    worst = sorted(ratios, key=ratios.__getitem__)[:WORST_LAYERS]
    dtypes = sorted({decision.layer.dtype for decision in plan.selected if decision.layer.dtype})
    summary: dict[str, Any] = {
        "source_dtypes": dtypes,
        "format": settings.format.name,
        "preset": settings.preset,
        "family": plan.family,
        "layers_quantized": len(results),
        "layers_kept": len(plan.decisions) - len(results),
        "bytes_before": model_bytes[0],
        "bytes_after": model_bytes[1],
        "groups": _groups(plan),
        "kept": dict(Counter(decision.reason for decision in plan.kept)),
        "worst_layers": [{"name": name, "sqnr_db": finite(ratios[name])} for name in worst],
        "worst_sqnr_db": finite(ratios[worst[0]]) if worst else None,
        "loras_baked": baked,
        "backend": route.backend if route else None,
        "backend_refusals": dict(route.refusals) if route else {},
        "device": device,
        "seconds": round(seconds, 3),
        "cache": cache,
    }
    layers = tuple(_layer(decision, results) for decision in plan.decisions)
    return Report(node, summary, layers, plan.notes, _text(summary, plan))


def _layer(decision: Decision, results: Mapping[str, LayerResult]) -> dict[str, Any]:
    layer, result = decision.layer, results.get(decision.layer.name)
    return {
        "name": layer.name,
        "format": decision.format.name if isinstance(decision, Quantize) else None,
        "group_size": decision.group_size if isinstance(decision, Quantize) else None,
        "shape": [layer.n, layer.k],
        "bytes_before": layer.nbytes,
        "bytes": result.nbytes if result else layer.nbytes,
        "sqnr_db": finite(result.sqnr_db) if result else None,
        "reason": decision.reason,
    }


def cache_note(state: str, nbytes: int) -> str | None:
    """What was done with weights that are held in the cache; None where the headline says it."""
    size = size_text(nbytes)
    if state == "written":
        return (
            f"{size} of weights are in the cache on the disk now; the next session starts with them"
        )
    if state == "rewritten":
        return (
            f"the weights in the cache were damaged and were made again ({size}); if that happens "
            "again, check the disk"
        )
    return None


def finite(decibel: float) -> float | None:
    """A ratio for JSON: None where it is infinite."""
    return round(decibel, 2) if math.isfinite(decibel) else None


def _groups(plan: Plan) -> dict[str, int]:
    counts = Counter(str(d.group_size or "not rotated") for d in plan.selected)
    return dict(counts.most_common())


def _text(summary: dict[str, Any], plan: Plan) -> str:
    lines = [_headline(summary)]
    if summary["layers_quantized"]:
        before, after = summary["bytes_before"], summary["bytes_after"]
        share = 100 * after / before if before else 100
        held = (
            f", held as {', '.join(summary['source_dtypes'])}" if summary["source_dtypes"] else ""
        )
        lines.append(f"model: {size_text(before)}{held} -> {size_text(after)} ({share:.0f} %)")
        groups = ", ".join(f"{group} ({n} layers)" for group, n in summary["groups"].items())
        lines.append(f"rotation group: {groups}")
        lines.append(f"largest layer runs on: {_backend(summary)}")
        if summary["loras_baked"]:
            lines.append(f"LoRAs merged into {summary['loras_baked']} weights before quantizing")
        lines.append("lowest signal to noise:")
        lines += [f"  {_decibel(w['sqnr_db'])}  {w['name']}" for w in summary["worst_layers"]]
    if plan.kept:
        lines.append(f"kept as they are ({len(plan.kept)}):")
        lines += [f"  {count} x {reason}" for reason, count in summary["kept"].items()]
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _headline(summary: dict[str, Any]) -> str:
    total = summary["layers_quantized"] + summary["layers_kept"]
    if not summary["layers_quantized"]:
        return f"nothing to do: none of the {total} layers is left to quantize"
    family = f", preset {summary['preset']}"
    if summary["family"]:
        family += f" (model family {summary['family']})"
    if summary["cache"] == "hit":
        return (
            f"{summary['layers_quantized']} of {total} layers are {summary['format']}{family}, read "
            f"from the cache on the disk in {summary['seconds']:.1f} s: nothing was quantized"
        )
    return (
        f"quantized {summary['layers_quantized']} of {total} layers to {summary['format']}"
        f"{family}, in {summary['seconds']:.1f} s on {summary['device']}"
    )


def _backend(summary: dict[str, Any]) -> str:
    backend = summary["backend"]
    name = f"comfy-kitchen {backend}" if backend else "no kernel; weights are dequantized per call"
    reasons = "; ".join(f"{key}: {why}" for key, why in summary["backend_refusals"].items())
    return f"{name} (not {reasons})" if reasons else name


def _decibel(value: float | None) -> str:
    return "  exact" if value is None else f"{value:5.1f} dB"


def size_text(nbytes: int) -> str:
    """Bytes in MB or GB."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
