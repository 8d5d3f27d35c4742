"""Running an INT8 linear with the backend and row chunks that suit it, and with the next if one fails.

Decided once per shape class: device, dtype, N, K, G and M, rounded up. On a GPU in mode "auto" the
candidates are measured when a class is first seen; otherwise the order of preference decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from .backend import Backend, LinearRequest, NoBackendError
from .out_of_memory import is_out_of_memory
from .row_split import RowSplit, SelectedConfig, row_chunks, rows_per_call
from .tuner import Tuner

logger = logging.getLogger(__name__)

AUTO = "auto"
ROW_STEP = 1024
NEVER_MEASURED = ("reference", "dequantize")
"""Backends that exist to be right: they are slower by far, and need memory for float sums."""

NEVER_SPLIT = ("dequantize",)
"""A float product rounds by its number of rows, and indexes with 64 bits."""

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int | None]


@dataclass(frozen=True)
class LinearSettings:
    """How INT8 linears run. backend: "auto", or the name of the one to prefer; verbose: log for every
    shape class also what cannot run it and why."""

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
    def of(cls, request: LinearRequest, device: torch.device | None = None) -> ShapeClass:
        """The class of a request, on one of several cards if `device` is given."""
        rows = 1 << max(request.m - 1, 0).bit_length()
        if rows > ROW_STEP:
            rows = -(-request.m // ROW_STEP) * ROW_STEP
        place = request.device if device is None else str(device)
        return cls(place, request.dtype, rows, request.n, request.k, request.group_size)

    @property
    def key(self) -> str:
        """The class as a short text, for logs and the tuner's file."""
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"{dtype} M<={self.rows} N={self.n} K={self.k} G={self.group_size or 0}"
        return shape if self.device in ("cpu", "cuda", "cuda:0") else f"{self.device} {shape}"


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
            ValueError: if the operands do not fit each other.
            NoBackendError: if every backend refuses or has failed.
            Exception: of the first backend, if all fail on these operands or memory ran out.
        """
        require_fitting(x, weight, weight_scale, bias)
        k, n = x.shape[-1], weight.shape[0]
        flat = x.reshape(-1, k)
        if flat.shape[0] == 0 or n == 0:
            return x.new_empty(*x.shape[:-1], n)
        request = LinearRequest(flat.device.type, x.dtype, flat.shape[0], n, k, group_size)
        with on_device(flat.device):
            out = self._run(request, flat, (weight, weight_scale, bias, group_size))
        return out.reshape(*x.shape[:-1], n)

    def _run(
        self, request: LinearRequest, flat: torch.Tensor, arguments: Arguments
    ) -> torch.Tensor:
        """Try what was decided, then the others; a backend is given up once another did it."""
        errors: dict[str, Exception] = {}
        while True:
            try:
                decision = self._decide(request, flat, arguments, errors)
            except NoBackendError:
                if errors:  # all fail on these arguments: they are at fault, not the backends
                    raise next(iter(errors.values())) from None
                raise
            backend = decision.candidate.backend
            try:
                out = run_in_chunks(decision.candidate, flat, *arguments)
            except Exception as error:  # of another package's kernel, or of a driver
                if is_out_of_memory(error):
                    raise
                errors[backend.name] = error
                self.decisions.pop(ShapeClass.of(request, flat.device), None)
                continue
            for name, error in errors.items():
                self._give_up(name, error)
            return out

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
            try:
                reason = backend.refuses(request)
            except Exception as error:  # asking another package may fail as its kernels do
                reason = f"cannot be asked: {type(error).__name__}: {error}"
            if reason is not None:
                refusals[backend.name] = reason
                continue
            found += [Candidate(backend, rows) for rows in self._row_counts(backend, request)]
        return found, refusals

    def _row_counts(self, backend: Backend, request: LinearRequest) -> list[int]:
        """Rows per call by the policy, and in mode "auto" all of them, too."""
        m, n, k = ShapeClass.of(request).rows, request.n, request.k
        if backend.name in NEVER_SPLIT:
            return [m]
        whole = rows_per_call(m, n, k, RowSplit("off"))
        try:
            rows = rows_per_call(m, n, k, self.settings.split, self._config_of(backend))
        except Exception:  # the library's own choice is private to it and may change
            rows = rows_per_call(m, n, k, self.settings.split)
        return list(dict.fromkeys([rows, whole] if self.settings.split.mode == "auto" else [rows]))

    def _config_of(self, backend: Backend) -> SelectedConfig | None:
        """Only comfy-kitchen's kernels have its configurations; others need no splitting."""
        if backend.name == "comfy-kitchen":
            return self._selected_config
        return _always_data_parallel

    def _decide(
        self,
        request: LinearRequest,
        flat: torch.Tensor,
        arguments: Arguments,
        failed: Mapping[str, Exception],
    ) -> Decision:
        shape = ShapeClass.of(request, flat.device)
        known = self.decisions.get(shape)
        if known is not None and known.candidate.backend.name not in self.failures:
            return known
        found, refusals = self.candidates(request)
        candidates = [c for c in found if c.backend.name not in failed]
        if not candidates:
            raise NoBackendError(request, refusals)
        chosen, reason = candidates[0], "preferred"
        if self._tuner is not None and not failed and may_measure(flat):
            chosen, reason = self._measured(self._tuner, shape, candidates, flat, arguments)
        decision = Decision(chosen, reason, refusals)
        self.decisions[shape] = decision
        logger.info("int8 linear %s: %s (%s)", shape.key, chosen.name, reason)
        if self.settings.verbose:
            for name, why in refusals.items():
                logger.info("int8 linear %s: not %s: %s", shape.key, name, why)
        return decision

    def _measured(
        self,
        tuner: Tuner,
        shape: ShapeClass,
        candidates: Sequence[Candidate],
        flat: torch.Tensor,
        arguments: Arguments,
    ) -> tuple[Candidate, str]:
        """The fastest of the preferred backends; of a named one, its row counts only."""
        first = candidates[0].backend.name
        tried = [c for c in candidates if c.backend.name not in NEVER_MEASURED]
        if self.settings.backend == first or not tried:
            tried = [c for c in candidates if c.backend.name == first]
        # The library's own default, all rows at once, is what the others have to beat.
        tried.sort(key=lambda c: (c.backend.name != first, -c.rows))
        if len(tried) == 1:
            return tried[0], "preferred"

        def run(index: int) -> Callable[[], object]:
            return lambda: run_in_chunks(tried[index], flat, *arguments)

        best = tuner.best(shape.key, [candidate.name for candidate in tried], run)
        if best is None:
            return candidates[0], "preferred"
        for index, error in best.failed.items():
            self._give_up(tried[index].backend.name, error)
        return tried[best.index], best.reason

    def _give_up(self, name: str, error: Exception) -> None:
        if name in self.failures:
            return
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


def may_measure(x: torch.Tensor) -> bool:
    """Not while torch.compile traces or a CUDA graph records: that would record the measurement."""
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing()


def require_fitting(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Refuse operands that do not fit each other, before any backend is blamed for it.

    Raises:
        ValueError: naming the shapes.
    """
    n, k = weight.shape
    fits = x.ndim and x.shape[-1] == k and weight_scale.numel() == n
    if not fits or (bias is not None and bias.shape != (n,)):
        shapes = [list(t.shape) for t in (x, weight, weight_scale, bias) if t is not None]
        raise ValueError(f"input, weight, scale and bias do not fit each other: {shapes}")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a card the current one while its kernels are launched, and set it back."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
