"""`leandit cache`: what is kept, its limit, and clearing it."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.cli import main
from leandit.kernels.cache_folder import cache_folder
from leandit.loaders.stream import TensorSpec
from leandit.loaders.weight_cache import WeightCache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightCache:
    """The user's own cache, in a folder of the test."""
    monkeypatch.setenv(
        "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", str(tmp_path)
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    return WeightCache(cache_folder() / "weights")


ABOUT = {"model": "Flux", "format": "int8_convrot", "file": "flux1-dev.safetensors"}


def fill(cache: WeightCache, key: str = "a") -> Any:
    """An entry of a tenth of a megabyte."""
    specs = [TensorSpec("layer.weight", "I8", (100_000,))]
    tensors = [("layer.weight", torch.ones(100_000, dtype=torch.int8))]
    return cache.write(key, specs, {}, tensors, ABOUT)


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["cache", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_empty_cache_is_no_fault(cache: WeightCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert data(capsys) == {
        "folder": str(cache.folder),
        "limit_bytes": 64_000_000_000,
        "bytes": 0,
        "entries": [],
    }
    assert main(["cache", "--clear"]) == 0
    assert not cache.folder.exists()


def test_entries_are_listed_as_text_and_as_json(
    cache: WeightCache, capsys: pytest.CaptureFixture[str]
) -> None:
    held = fill(cache)
    assert main(["cache"]) == 0
    text = capsys.readouterr().out
    assert "Flux" in text
    assert "int8_convrot" in text
    assert "yes" in text
    assert "flux1-dev.safetensors" in text
    assert "1 entry, 0.1 MB of at most 64.00 GB" in text
    (entry,) = data(capsys)["entries"]
    assert entry["key"] == "a"
    assert entry["bytes"] == cache.nbytes
    assert entry["in_use"] is True
    assert (entry["model"], entry["file"]) == ("Flux", "flux1-dev.safetensors")
    assert entry["last_used"].endswith("+00:00")
    del held


def test_clearing_spares_what_is_in_use(
    cache: WeightCache, capsys: pytest.CaptureFixture[str]
) -> None:
    held = fill(cache)
    size = cache.nbytes
    fill(cache, "b")
    gc.collect()
    assert main(["cache", "--clear"]) == 0
    text = capsys.readouterr().out
    assert f"removed {size / 1e6:.1f} MB; {size / 1e6:.1f} MB stay, a running ComfyUI uses" in text
    fill(cache, "b")
    gc.collect()
    result = data(capsys, "--clear")
    assert (result["removed_bytes"], result["kept_in_use_bytes"]) == (size, size)
    assert [entry["key"] for entry in result["entries"]] == ["a"]
    del held
    gc.collect()
    assert data(capsys, "--clear")["entries"] == []


def test_a_limit_is_kept_and_acts_at_once(
    cache: WeightCache, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(cache)
    gc.collect()
    result = data(capsys, "--limit", "0.00005")
    assert (result["limit_bytes"], result["bytes"]) == (50_000, 0)
    assert result["removed_bytes"] > 100_000
    assert data(capsys, "--limit", "1.5")["limit_bytes"] == 1_500_000_000
    assert data(capsys)["limit_bytes"] == 1_500_000_000


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(
    cache: WeightCache, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    assert main(["cache", f"--limit={limit}"]) == 2
    assert "--limit must be a number of GB above 0" in capsys.readouterr().err
