"""Running an INT8 linear with the backend and row chunks that suit it, and with the next if one fails.

Decided once per shape class: device, dtype, N, K, G and M up to the next power of 2. On a GPU in
mode "auto" the candidates are measured when a class is first seen; otherwise the order of
preference decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .backend import Backend, LinearRequest, NoBackendError
from .row_split import RowSplit, SelectedConfig, row_chunks, rows_per_call
from .tuner import Tuner

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class LinearSettings:
    """How INT8 linears run. backend: "auto", or the name of the one to prefer; verbose: log every
    shape class at level INFO, else DEBUG."""

    split: RowSplit = field(default_factory=RowSplit)
    backend: str = AUTO
    verbose: bool = False


@dataclass(frozen=True)
class ShapeClass:
    """Linears that are run alike."""

    device: str
    dtype: torch.dtype
    rows: int
    n: int
    k: int
    group_size: int | None

    @classmethod
    def of(cls, request: LinearRequest) -> ShapeClass:
        """The class of a request."""
        rows = 1 << max(request.m - 1, 0).bit_length()
        return cls(request.device, request.dtype, rows, request.n, request.k, request.group_size)

    @property
    def key(self) -> str:
        """The class as a short text, for logs and the tuner's file."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} M<={self.rows} N={self.n} K={self.k} G={self.group_size or 0}"


@dataclass(frozen=True)
class Candidate:
    """One way to run a linear."""

    backend: Backend
    rows: int

    @property
    def name(self) -> str:
        """Backend and rows per call, as in reports and the tuner's file."""
        return f"{self.backend.name} x {self.rows}"


@dataclass(frozen=True)
class Decision:
    """What runs for a shape class, and why."""

    candidate: Candidate
    reason: str
    refusals: dict[str, str]


class Dispatcher:
    """Chooses, runs, and remembers what it chose and what failed."""

    def __init__(
        self,
        settings: LinearSettings,
        backends: Sequence[Backend],
        selected_config: SelectedConfig | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        self.settings = settings
        self.decisions: dict[ShapeClass, Decision] = {}
        self.failures: dict[str, str] = {}
        self._backends = _preferred_first(backends, settings.backend)
        self._selected_config = selected_config
        self._tuner = tuner

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int | None,
    ) -> torch.Tensor:
        """`kernels.int8.int8_linear` with the same arguments.

        Raises:
            NoBackendError: if every backend refuses or has failed.
            torch.OutOfMemoryError: unchanged; another backend would not need less.
        """
        k = x.shape[-1]
        flat = x.reshape(-1, k)
        n = weight.shape[0]
        if flat.shape[0] == 0 or n == 0:
            return x.new_empty(*x.shape[:-1], n)
        request = LinearRequest(flat.device.type, x.dtype, flat.shape[0], n, k, group_size)
        arguments = (weight, weight_scale, bias, group_size)
        while True:
            decision = self._decide(request, flat, arguments)
            try:
                out = run_in_chunks(decision.candidate, flat, *arguments)
                return out.reshape(*x.shape[:-1], n)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a kernel of another package, or of a driver, has failed
                self._give_up(decision.candidate.backend.name, error)

    def decide(self, request: LinearRequest) -> Decision:
        """What would run, without running or measuring anything.

        Raises:
            NoBackendError: if nothing would.
        """
        candidates, refusals = self.candidates(request)
        if not candidates:
            raise NoBackendError(request, refusals)
        return Decision(candidates[0], "preferred", refusals)

    def candidates(self, request: LinearRequest) -> tuple[list[Candidate], dict[str, str]]:
        """Every capable backend with every row count worth trying, preferred first; and refusals."""
        refusals = dict(self.failures)
        found = []
        for backend in self._backends:
            if backend.name in refusals:
                continue
            reason = backend.refuses(request)
            if reason is not None:
                refusals[backend.name] = reason
                continue
            m, n, k = ShapeClass.of(request).rows, request.n, request.k
            rows = rows_per_call(m, n, k, self.settings.split, self._config_of(backend))
            whole = rows_per_call(m, n, k, RowSplit("off"))
            counts = [rows] if self.settings.split.mode != "auto" else [rows, whole]
            found += [Candidate(backend, count) for count in dict.fromkeys(counts)]
        return found, refusals

    def _config_of(self, backend: Backend) -> SelectedConfig | None:
        """Only comfy-kitchen's kernels have its configurations; others need no splitting."""
        if backend.name == "comfy-kitchen":
            return self._selected_config
        return _always_data_parallel

    def _decide(self, request: LinearRequest, flat: torch.Tensor, arguments: tuple) -> Decision:
        shape = ShapeClass.of(request)
        known = self.decisions.get(shape)
        if known is not None and known.candidate.backend.name not in self.failures:
            return known
        candidates, refusals = self.candidates(request)
        if not candidates:
            raise NoBackendError(request, refusals)
        chosen, reason = candidates[0], "preferred"
        if self._tuner is not None and len(candidates) > 1 and _may_measure(flat):
            names = [candidate.name for candidate in candidates]

            def run(index: int) -> Callable[[], object]:
                return lambda: run_in_chunks(candidates[index], flat, *arguments)

            best = self._tuner.best(shape.key, names, run)
            if best is not None:
                chosen, reason = candidates[best.index], best.reason
        decision = Decision(chosen, reason, refusals)
        self.decisions[shape] = decision
        level = logging.INFO if self.settings.verbose else logging.DEBUG
        logger.log(level, "int8 linear %s: %s (%s)", shape.key, chosen.name, reason)
        return decision

    def _give_up(self, name: str, error: Exception) -> None:
        reason = f"failed: {type(error).__name__}: {error}"
        self.failures[name] = reason
        logger.warning("int8 linear: %s %s; the next backend takes over", name, reason)


def run_in_chunks(
    candidate: Candidate,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int | None,
) -> torch.Tensor:
    """The linear of x (M, K) in chunks of rows, written into one result; slices are not copied."""
    run = candidate.backend.linear
    chunks = row_chunks(x.shape[0], candidate.rows)
    if len(chunks) == 1:
        return run(x, weight, weight_scale, bias, group_size)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for rows in chunks:
        out[rows] = run(x[rows], weight, weight_scale, bias, group_size)
    return out


def _preferred_first(backends: Sequence[Backend], name: str) -> list[Backend]:
    """Raises ValueError for a name that no backend has."""
    names = [backend.name for backend in backends]
    if name == AUTO:
        return list(backends)
    if name not in names:
        raise ValueError(f"unknown backend {name!r}; valid: {', '.join((AUTO, *names))}")
    return sorted(backends, key=lambda backend: backend.name != name)


def _always_data_parallel(m: int, n: int, k: int) -> int:
    return 0


def _may_measure(x: torch.Tensor) -> bool:
    """Not while torch.compile traces or a CUDA graph records: that would record the measurement."""
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing()
