"""Quantized weights kept on the disk from one session to the next, as native files.

An entry is `KEY.safetensors` and, written after it, `KEY.json` with the digest of every tensor: without
that the entry was never finished. What is in use, by any process, is never removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ..kernels.whole_file import keep_whole
from .digest import digest
from .errors import CacheError, CheckpointError
from .lease import Lease, is_leased
from .reader import Checkpoint, open_checkpoint
from .stream import TensorSpec, write_stream

CACHE_NAME = "weights"
"""The cache's folder in the package's cache folder."""

RECORD_VERSION = 1
GB = 1_000_000_000
USUAL_LIMIT = 64 * GB
LEFT_FREE = 4 * GB
"""Bytes of the disk that the cache leaves to others."""

LOCK_SECONDS = 20.0
VERIFYING_THREADS = 4
WEIGHTS, RECORD, PART = ".safetensors", ".json", ".part"


@dataclass(frozen=True)
class Entry:
    """An entry. used: when it was last asked for, seconds since 1970; about: what the caller noted."""

    key: str
    nbytes: int
    used: float
    in_use: bool
    about: Mapping[str, Any]


@dataclass(frozen=True)
class CachedFile:
    """An entry that is being used: while `lease` lives, it is not removed."""

    checkpoint: Checkpoint
    lease: Lease
    about: Mapping[str, Any]


class WeightCache:
    """A folder of entries with a limit on their bytes; those used longest ago leave first."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        """
        Args:
            folder: made when it is needed. limit: bytes; None takes what `set_limit` has kept.
        """
        self.folder = folder
        self._limit = limit

    @property
    def limit(self) -> int:
        """Most bytes of all entries together."""
        if self._limit is not None:
            return self._limit
        kept = _read_json(self._settings).get("limit_bytes")
        return kept if isinstance(kept, int) and not isinstance(kept, bool) else USUAL_LIMIT

    def set_limit(self, nbytes: int) -> int:
        """Keep a limit for all processes that use the folder; returns the bytes that left for it.

        Raises:
            CacheError: if the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"{self.folder} cannot be used: {error}") from error
        with self._locked():
            keep_whole(self._settings, json.dumps({"limit_bytes": nbytes}).encode())
            if _read_json(self._settings).get("limit_bytes") != nbytes:
                raise CacheError(f"{self._settings} cannot be written")
            before = self.nbytes
            for entry in reversed(self._entries()):
                if self.nbytes > nbytes and not entry.in_use:
                    self._delete(entry.key)
            return before - self.nbytes

    def has(self, key: str) -> bool:
        """Whether there is something under a key, whole or not."""
        return self._path(key).is_file()

    def find(self, key: str, specs: Sequence[TensorSpec]) -> CachedFile | None:
        """An entry whose every byte is as it was written; None, and no entry any more, otherwise.

        Args:
            specs: the tensors it has to hold.

        Raises:
            CacheError: if the folder cannot be used.
        """
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            with self._locked():
                lease = Lease(path)
            found = self._verified(path, specs)
            if found is None:
                lease.release()
                self._remove(key)
                return None
            checkpoint, record = found
            _touch(self._record(key))
        except OSError as error:
            raise CacheError(f"{self.folder} cannot be used: {error}") from error
        return CachedFile(checkpoint, lease, record["about"])

    def write(
        self,
        key: str,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        tensors: Iterable[tuple[str, torch.Tensor]],
        about: Mapping[str, Any],
    ) -> CachedFile:
        """Write an entry, tensor by tensor; older ones leave for it.

        Args:
            about: plain data to give back with it; it is read after the last of `tensors`.

        Raises:
            CacheError: if there is no room for it, or the folder cannot be written.
        """
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._make_room(sum(spec.nbytes for spec in specs), key)
                lease = Lease(path)
        except OSError as error:
            raise CacheError(f"{self.folder} cannot be used: {error}") from error
        try:
            digests = write_stream(path, specs, metadata, tensors)
            content = {"version": RECORD_VERSION, "digests": digests, "about": dict(about)}
            keep_whole(self._record(key), json.dumps(content).encode())
            if "digests" not in _read_json(self._record(key)):
                raise OSError(f"{self._record(key)} cannot be written")
            return CachedFile(open_checkpoint(path), lease, content["about"])
        except (OSError, CheckpointError) as error:
            lease.release()
            # Where another process has written and mapped the same entry, Windows lets nobody replace
            # it; that one is as good.
            other = self.find(key, specs)
            if other is not None:
                return other
            raise CacheError(f"it could not be written: {error}") from error
        except BaseException:
            lease.release()
            raise

    def entries(self) -> list[Entry]:
        """All finished entries, those used last first.

        Raises:
            CacheError: if the folder cannot be used.
        """
        with self._locked():
            return self._entries()

    def _entries(self) -> list[Entry]:
        """Called under the lock: asking for a lease must not meet one that is being made."""
        found = []
        for record in self.folder.glob(f"*{RECORD}"):
            path = record.with_suffix(WEIGHTS)
            content = _read_json(record)
            if record == self._settings or not path.is_file() or "about" not in content:
                continue
            size, used = path.stat().st_size, record.stat().st_mtime
            found.append(Entry(record.stem, size, used, is_leased(path), content["about"]))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> tuple[int, int]:
        """Remove what is not in use; returns the bytes removed, and the bytes that stay."""
        with self._locked():
            self._remove_leftovers()
            before = self.nbytes
            for path in self.folder.glob(f"*{WEIGHTS}"):
                if not is_leased(path):
                    self._delete(path.stem)
            after = self.nbytes
        return before - after, after

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in the folder, of unfinished files too."""
        return sum(
            file.stat().st_size
            for pattern in (f"*{WEIGHTS}", f".*{PART}")
            for file in self.folder.glob(pattern)
            if file.is_file()
        )

    @property
    def _settings(self) -> Path:
        return self.folder / "settings.json"

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{WEIGHTS}"

    def _record(self, key: str) -> Path:
        return self.folder / f"{key}{RECORD}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Within it, no other process takes a lease or removes an entry."""
        if not self.folder.is_dir():
            yield
            return
        lock = FileLock(self.folder / ".lock", timeout=LOCK_SECONDS)
        try:
            lock.acquire()
        except Timeout as error:
            raise CacheError(f"another process holds {self.folder} locked") from error
        except (OSError, NotImplementedError) as error:
            raise CacheError(f"{self.folder} cannot be used: {error}") from error
        try:
            yield
        finally:
            lock.release()

    def _verified(
        self, path: Path, specs: Sequence[TensorSpec]
    ) -> tuple[Checkpoint, dict[str, Any]] | None:
        record = _read_json(path.with_suffix(RECORD))
        digests = record.get("digests")
        if record.get("version") != RECORD_VERSION or not isinstance(digests, dict):
            return None
        try:
            checkpoint = open_checkpoint(path)
            held = {TensorSpec(e.name, e.dtype, e.shape) for e in checkpoint.entries.values()}
            if held != set(specs) or set(digests) != {spec.name for spec in specs}:
                return None
            with ThreadPoolExecutor(VERIFYING_THREADS) as pool:
                found = pool.map(lambda name: digest(checkpoint.read(name)), digests)
                same = all(one == digests[name] for name, one in zip(digests, found, strict=True))
        except (OSError, CheckpointError):
            return None
        return (checkpoint, record) if same and isinstance(record.get("about"), dict) else None

    def _make_room(self, needed: int, key: str) -> None:
        """Called under the lock.

        Raises:
            CacheError: if it stays too full.
        """
        self._remove_leftovers()
        if needed > self.limit:
            raise CacheError(
                f"it needs {needed / GB:.3g} GB, the cache's limit is {self.limit / GB:.3g} GB; "
                "raise it with leandit cache --limit"
            )
        oldest_first = [
            entry for entry in reversed(self._entries()) if entry.key != key and not entry.in_use
        ]
        used, free = self.nbytes, shutil.disk_usage(self.folder).free
        wanted = max(used + needed - self.limit, needed + LEFT_FREE - free)
        if wanted > sum(entry.nbytes for entry in oldest_first):
            # Nothing is removed in vain.
            if needed + LEFT_FREE - free < wanted:
                raise CacheError(
                    "what is in the cache is in use, and leaves no room under its limit of "
                    f"{self.limit / GB:.3g} GB; raise it with leandit cache --limit"
                )
            raise CacheError(
                f"it needs {needed / GB:.3g} GB and {LEFT_FREE / GB:.0f} GB to spare, the disk of "
                f"{self.folder} has {free / GB:.3g} GB free"
            )
        for entry in oldest_first:
            if wanted <= 0:
                return
            self._delete(entry.key)
            wanted -= entry.nbytes

    def _remove_leftovers(self) -> None:
        """What killed processes have left; called under the lock."""
        for part in self.folder.glob(f".*{PART}"):
            key = part.name[1:].partition(".")[0]
            if not is_leased(self._path(key)):
                _unlink(part)
        for path in self.folder.glob(f"*{WEIGHTS}"):
            if not self._record(path.stem).is_file() and not is_leased(path):
                _unlink(path)

    def _remove(self, key: str) -> None:
        """Remove an entry that nobody uses."""
        with self._locked():
            if not is_leased(self._path(key)):
                self._delete(key)

    def _delete(self, key: str) -> None:
        _unlink(self._record(key))
        _unlink(self._path(key))


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return  # Windows does not remove what some program has open; the next time will


def _touch(path: Path) -> None:
    """Note that an entry is used; without it, it only leaves earlier."""
    try:
        os.utime(path)
    except OSError:
        return


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
