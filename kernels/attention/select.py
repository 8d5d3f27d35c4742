"""Choosing the backend of one attention call: a pure function of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .contract import AttentionBackend
from .request import AttentionRequest
from .schedule import Moment, Schedule, TauProfile, why_dense

EXACT = "the model asks for exact attention"

KEEP = "keep"
"""Leave the call to whatever would have run without the node."""


@dataclass(frozen=True)
class AttentionSettings:
    """dense, sparse: names as in `names.py`; strict: refuse to run rather than fall back; check:
    "off", "report" or "fallback"; sink_tokens: of the start of the sequence, -1 for what the model
    says; keep: share of key blocks for top-k backends."""

    dense: str = "auto"
    sparse: str = "none"
    schedule: Schedule = field(default_factory=Schedule)
    tau: TauProfile = field(default_factory=TauProfile)
    sink_tokens: int = -1
    keep: float = 0.5
    strict: bool = False
    check: str = "fallback"


@dataclass(frozen=True)
class Choice:
    """backend: its name, or KEEP; reason: why it is not the one the user wished, "" if it is;
    refused: whether that reason is a refusal, and not the schedule."""

    backend: str
    reason: str = ""
    refused: bool = False


def select(
    settings: AttentionSettings,
    request: AttentionRequest,
    moment: Moment,
    layer: int | None,
    layers: int | None,
    backends: Mapping[str, AttentionBackend],
    dropped: Mapping[str, str],
) -> Choice:
    """The backend for a call.

    Args:
        layer, layers: index of the layer and their number, None if not known.
        dropped: backends that failed or were found broken in this run, and why.
    """
    reason, refused = "", False
    if settings.sparse != "none":
        dense_because = _why_never_sparse(request) or why_dense(
            settings.schedule, moment, layer, layers, request.tokens
        )
        if dense_because is None:
            refusal = _why_not(settings.sparse, request, backends, dropped)
            if refusal is None:
                return Choice(settings.sparse)
            reason, refused = f"{settings.sparse}: {refusal}", True
        else:
            reason = dense_because
    if settings.dense in (KEEP, "sdpa"):
        return Choice(settings.dense, reason, refused)
    if settings.dense == "auto":
        # Exact kernels only: what costs quality is for the user to ask for.
        usable = _why_not("fa", request, backends, dropped) is None
        return Choice("fa" if usable else KEEP, reason, refused)
    if request.exact_only and backends[settings.dense].kind != "exact":
        return Choice(KEEP, "; ".join(filter(None, (reason, EXACT))), refused)
    refusal = _why_not(settings.dense, request, backends, dropped)
    if refusal is None:
        return Choice(settings.dense, reason, refused)
    both = "; ".join(filter(None, (reason, f"{settings.dense}: {refusal}")))
    return Choice(KEEP, both, True)


def _why_never_sparse(request: AttentionRequest) -> str | None:
    """What no sparse backend is for, so that it is nobody's failure."""
    if not request.is_self_attention:
        return "cross-attention"
    return EXACT if request.exact_only else None


def _why_not(
    name: str,
    request: AttentionRequest,
    backends: Mapping[str, AttentionBackend],
    dropped: Mapping[str, str],
) -> str | None:
    if name in dropped:
        return dropped[name]
    return backends[name].refuses(request)
