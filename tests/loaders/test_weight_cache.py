"""The cache of quantized weights: whole entries or none, within its limit, across processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from leandit.loaders import stream, weight_cache
from leandit.loaders.errors import CacheError
from leandit.loaders.lease import Lease, is_leased
from leandit.loaders.stream import TensorSpec
from leandit.loaders.weight_cache import LEFT_FREE, WeightCache

COUNT, SIZE = 4, 1000
SPECS = [TensorSpec(f"layer.{i}.weight", "I8", (SIZE,)) for i in range(COUNT)]
ABOUT = {"model": "Flux", "format": "int8"}


def tensors(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, spec in enumerate(SPECS):
        yield spec.name, torch.full((SIZE,), seed + index, dtype=torch.int8)


def write(cache: WeightCache, key: str, seed: int = 0) -> Any:
    return cache.write(key, SPECS, {}, tensors(seed), ABOUT)


def keys(cache: WeightCache) -> list[str]:
    return [entry.key for entry in cache.entries()]


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "weights", 20_000)


def test_what_is_written_is_found(cache: WeightCache) -> None:
    assert cache.find("a", SPECS) is None
    assert not cache.folder.exists()
    write(cache, "a", 3)
    found = cache.find("a", SPECS)
    assert found is not None
    assert found.about == ABOUT
    assert [int(found.checkpoint.read(s.name)[0]) for s in SPECS] == [3, 4, 5, 6]


def test_an_entry_of_other_tensors_is_not_taken(cache: WeightCache) -> None:
    write(cache, "a")
    gc.collect()
    assert cache.find("a", [*SPECS[1:], TensorSpec("layer.0.weight", "U8", (SIZE,))]) is None
    assert not cache.entries()


def test_those_used_longest_ago_leave_first(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 3 * 4600)
    for age, key in enumerate("abc"):
        write(cache, key)
        os.utime(tmp_path / f"{key}.json", (age, age))
    gc.collect()
    assert cache.find("a", SPECS) is not None  # used just now
    gc.collect()
    write(cache, "d")
    assert sorted(keys(cache)) == ["a", "c", "d"]
    assert cache.nbytes <= cache.limit


def test_an_entry_in_use_stays(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 2 * 4600)
    held = write(cache, "a")
    write(cache, "b")
    gc.collect()
    write(cache, "c")
    assert sorted(keys(cache)) == ["a", "c"]
    also = cache.find("c", SPECS)
    with pytest.raises(CacheError, match="is in use, and leaves no room"):
        write(cache, "d")
    assert sorted(keys(cache)) == ["a", "c"]
    assert cache.clear() == (0, cache.nbytes)
    del held, also
    gc.collect()
    assert cache.clear()[1] == 0


def test_more_than_the_limit_is_refused_at_once(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 3999)
    with pytest.raises(CacheError, match=r"its? needs .* limit"):
        write(cache, "a")
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_limit_is_kept_for_all_processes(tmp_path: Path) -> None:
    assert WeightCache(tmp_path).limit == 64_000_000_000
    tmp_path.joinpath("settings.json").write_text('{"limit_bytes": "many"}')
    assert WeightCache(tmp_path).limit == 64_000_000_000
    WeightCache(tmp_path).set_limit(123)
    assert WeightCache(tmp_path).limit == 123
    assert not WeightCache(tmp_path).entries()


def test_tensors_that_raise_leave_nothing(cache: WeightCache) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors(0))[:2]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.write("a", SPECS, {}, failing(), ABOUT)
    gc.collect()
    assert [p.name for p in cache.folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file in the way")
    cache = WeightCache(tmp_path / "weights")
    with pytest.raises(CacheError, match="cannot be used"):
        write(cache, "a")
    with pytest.raises(CacheError, match="cannot be used"):
        cache.set_limit(1)


WRITER = """
import sys, time
from pathlib import Path
import torch
from leandit.loaders.stream import TensorSpec
from leandit.loaders.weight_cache import WeightCache

folder, seed, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
specs = [TensorSpec(f"layer.{i}.weight", "I8", (1000,)) for i in range(4)]

def tensors():
    for index, spec in enumerate(specs):
        time.sleep(pause)
        yield spec.name, torch.full((1000,), seed + index, dtype=torch.int8)

WeightCache(folder, 1 << 20).write("a", specs, {}, tensors(), {})
"""


def writer(folder: Path, seed: int, pause: float) -> subprocess.Popen[bytes]:
    """Another process that writes entry "a"."""
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(seed), str(pause)])


def test_two_processes_may_write_the_same_key(tmp_path: Path) -> None:
    both = [writer(tmp_path, 7, 0.05) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    found = WeightCache(tmp_path).find("a", SPECS)
    assert found is not None
    assert [int(found.checkpoint.read(s.name)[0]) for s in SPECS] == [7, 8, 9, 10]
    assert not list(tmp_path.glob(".*.part"))


def test_two_that_disagree_end_with_one_whole_entry_or_none(tmp_path: Path) -> None:
    both = [writer(tmp_path, seed, 0.02) for seed in (7, 50)]
    assert [process.wait(120) for process in both] == [0, 0]
    found = WeightCache(tmp_path).find("a", SPECS)
    if found is not None:
        assert [int(found.checkpoint.read(s.name)[0]) for s in SPECS] in (
            [7, 8, 9, 10],
            [50, 51, 52, 53],
        )


def test_a_process_killed_while_writing_leaves_nothing_that_counts(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 20)
    process = writer(tmp_path, 1, 60)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".a.safetensors.*.part")) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_leased(tmp_path / "a.safetensors")
    assert cache.find("a", SPECS) is None
    # While it lives, nobody takes its unfinished file away.
    write(cache, "b")
    assert list(tmp_path.glob(".a.safetensors.*.part"))
    process.kill()
    process.wait(60)
    assert not is_leased(tmp_path / "a.safetensors")
    assert keys(cache) == ["b"]
    write(cache, "a")
    assert not list(tmp_path.glob(".*.part"))
    assert sorted(keys(cache)) == ["a", "b"]


def test_a_file_that_may_not_be_replaced_is_taken_if_it_is_as_good(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where another process has mapped the entry it wrote in the meantime."""
    held = write(cache, "a")

    def refused(*_: Any) -> None:
        raise PermissionError("in use")

    monkeypatch.setattr(stream.os, "replace", refused)
    again = write(cache, "a")
    assert again.checkpoint.path == held.checkpoint.path
    with pytest.raises(CacheError, match="could not be written: in use"):
        write(cache, "b")
    gc.collect()
    assert keys(cache) == ["a"]


def test_a_record_that_cannot_be_written_is_no_entry(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "keep_whole", lambda *_: None)
    with pytest.raises(CacheError, match=r"a\.json cannot be written"):
        write(cache, "a")
    monkeypatch.undo()
    gc.collect()
    assert not cache.has("a")
    assert not cache.entries()


@pytest.mark.parametrize("error", [PermissionError("not yours"), OSError(28, "No space left")])
def test_a_lease_that_cannot_be_had_is_said(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    write(cache, "a")

    def refused(file: Path) -> None:
        raise error

    monkeypatch.setattr(weight_cache, "Lease", refused)
    for use in (lambda: cache.find("a", SPECS), lambda: write(cache, "a")):
        with pytest.raises(CacheError, match="cannot be used"):
            use()


def test_an_entry_of_another_user_is_read_though_its_time_cannot_be_set(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cache, "a")

    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(weight_cache.os, "utime", refused)
    assert cache.find("a", SPECS) is not None


def test_what_some_program_holds_open_does_not_stop_clearing(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in "ab":
        write(cache, key)
    (cache.folder / "b.json").unlink()
    gc.collect()
    unlink = Path.unlink

    def held_open(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":
            raise PermissionError
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", held_open)
    assert cache.clear() == (0, cache.nbytes)
    monkeypatch.undo()
    assert cache.clear()[1] == 0


def spoil(path: Path) -> None:
    """Turn one bit in the middle of the data."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_record(**changes: Any) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        record = path.with_suffix(".json")
        record.write_text(json.dumps(json.loads(record.read_text()) | changes))

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": spoil,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_bytes(b"not a safetensors file at all" * 100),
    "without a record": lambda path: path.with_suffix(".json").unlink(),
    "a record that is a list": lambda path: path.with_suffix(".json").write_text("[1, 2]"),
    "a record cut short": lambda path: path.with_suffix(".json").write_text('{"version": 1'),
    "a record of another version": change_record(version=2),
    "a record without digests": change_record(digests=None),
    "a record of other tensors": change_record(digests={}),
    "a record without notes": change_record(about=None),
    "weights gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_not_taken_and_can_be_made_again(
    cache: WeightCache, damage: str
) -> None:
    write(cache, "a")
    gc.collect()
    DAMAGES[damage](cache.folder / "a.safetensors")
    assert cache.find("a", SPECS) is None
    assert not cache.entries()
    assert not cache.has("a")
    write(cache, "a")
    assert cache.find("a", SPECS) is not None


def test_a_disk_without_room_is_refused_and_older_entries_leave_first(
    cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cache, "a")
    gc.collect()

    class Usage:
        @property
        def free(self) -> int:
            return LEFT_FREE + COUNT * SIZE - (1 if cache.has("a") else 0)

    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda _: Usage())
    write(cache, "b")
    assert keys(cache) == ["b"]
    gc.collect()
    monkeypatch.setattr(weight_cache, "LEFT_FREE", LEFT_FREE + 1_000_000)
    with pytest.raises(CacheError, match="GB free"):
        write(cache, "c")
    assert keys(cache) == ["b"]  # it would not have been enough, so it stays


def test_a_smaller_limit_lets_the_oldest_leave_at_once(cache: WeightCache) -> None:
    for age, key in enumerate("abc"):
        write(cache, key)
        os.utime(cache.folder / f"{key}.json", (age, age))
    gc.collect()
    size = cache.nbytes // 3
    assert cache.set_limit(2 * size) == size
    assert sorted(keys(cache)) == ["b", "c"]
    held = cache.find("b", SPECS)
    assert cache.set_limit(1) == size
    assert keys(cache) == ["b"]
    del held


def test_weights_without_their_record_were_never_finished(cache: WeightCache) -> None:
    write(cache, "a")
    gc.collect()
    (cache.folder / "a.json").unlink()
    assert not cache.entries()
    write(cache, "b")
    assert not (cache.folder / "a.safetensors").exists()


def test_a_lease_ends_with_its_holder(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    assert not is_leased(file)
    one, other = Lease(file), Lease(file)
    assert is_leased(file)
    one.release()
    one.release()
    assert is_leased(file)
    del other
    gc.collect()
    assert not is_leased(file)
    assert not list(tmp_path.iterdir())


def test_a_record_names_what_it_is_about(cache: WeightCache) -> None:
    write(cache, "a")
    record = json.loads((cache.folder / "a.json").read_text())
    assert record["about"] == ABOUT
    assert set(record["digests"]) == {spec.name for spec in SPECS}
