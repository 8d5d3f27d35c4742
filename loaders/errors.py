"""What can be wrong with a file; the message names the file, the tensor, the limit and the remedy."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(ValueError):
    """A file that cannot be read as what it claims to be."""

    def __init__(self, path: Path, fault: str, remedy: str = "download or write it again") -> None:
        self.path = path
        self.fault = fault
        self.remedy = remedy
        super().__init__(f"{path}: {fault}; {remedy}")


class CacheError(Exception):
    """Why weights cannot be kept in the cache; they are held in memory then."""
