"""Signs that a process uses a file: held as locked files, which the system frees when it dies."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

SUFFIX = ".lease"


class Lease:
    """Held from its making until `release`, or until nothing refers to it any more."""

    def __init__(self, file: Path) -> None:
        """
        Args:
            file: what is used; the sign lies beside it.
        """
        self._path = file.with_name(f"{file.name}.{uuid.uuid4().hex}{SUFFIX}")
        self._lock = FileLock(self._path, thread_local=False)
        self._lock.acquire()

    def release(self) -> None:
        """Give it up; a second time does nothing."""
        if self._lock.is_locked:
            self._lock.release()
            _remove(self._path)

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self.release()


def is_leased(file: Path) -> bool:
    """Whether a living process uses a file. What dead ones have left is removed."""
    leased = False
    for sign in file.parent.glob(f"{file.name}.*{SUFFIX}"):
        lock = FileLock(sign, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            leased = True
        else:
            lock.release()
            _remove(sign)
    return leased


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # gone already, or another process is looking at it and will remove it
