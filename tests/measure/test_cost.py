import json
import logging
from pathlib import Path

import pytest

from memfit.files import write_atomically
from memfit.measure import cost as costs
from memfit.measure.cost import CostCache, OperatorCost

ONE = OperatorCost(workspace_bytes=100, output_bytes=(8, 16))
TWO = OperatorCost(workspace_bytes=0, output_bytes=(), time_us=12.5)


@pytest.fixture
def cache(tmp_path: Path) -> CostCache:
    return CostCache("cpu", tmp_path)


def test_costs_survive_their_file(cache: CostCache) -> None:
    cache.save({"one": ONE, "two": TWO})
    assert cache.load() == {"one": ONE, "two": TWO}


def test_an_absent_file_is_empty_and_no_reason_to_warn(cache: CostCache, caplog: pytest.LogCaptureFixture) -> None:
    assert cache.load() == {}
    assert not caplog.records


def test_what_another_process_wrote_meanwhile_is_kept(cache: CostCache) -> None:
    cache.save({"one": ONE})
    cache.save({"two": TWO})
    assert cache.load() == {"one": ONE, "two": TWO}


def test_a_new_measurement_replaces_the_old(cache: CostCache) -> None:
    cache.save({"one": ONE})
    cache.save({"one": TWO})
    assert cache.load() == {"one": TWO}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"format": "memfit.costs", "version": 99, "costs": {}}',
        '{"format": "memfit.costs", "version": 1}',
        '{"format": "memfit.costs", "version": 1, "costs": []}',
        '{"format": "memfit.costs", "version": 1, "costs": {"one": 3}}',
        '{"format": "memfit.costs", "version": 1, "costs": {"one": {"time_us": null}}}',
    ],
)
def test_a_damaged_file_is_reported_and_empty(cache: CostCache, caplog: pytest.LogCaptureFixture, content: str) -> None:
    cache.path.write_text(content)
    assert cache.load() == {}
    assert "is damaged" in caplog.text


def test_bytes_that_are_no_text_are_damage(cache: CostCache, caplog: pytest.LogCaptureFixture) -> None:
    cache.path.write_bytes(b"\xff\xfe\x00")
    assert cache.load() == {}
    assert "is damaged" in caplog.text


def test_a_damaged_file_is_replaced_by_the_next_measurement(cache: CostCache) -> None:
    cache.path.write_text("{")
    cache.save({"one": ONE})
    assert cache.load() == {"one": ONE}


def test_a_folder_that_cannot_be_written_is_reported_and_not_fatal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CostCache("cpu", tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        cache.save({"one": ONE})
    assert "could not be written" in caplog.text


def test_the_folder_is_the_one_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "mine"))
    assert CostCache("cpu").path.parent == tmp_path / "mine"


def test_without_a_choice_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_CACHE_DIR")
    assert "memfit" in CostCache("cpu").path.parts[-2]


def test_devices_builds_and_thread_counts_have_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [CostCache(device, tmp_path).path for device in ("cpu", "NVIDIA A100-SXM4-40GB")]
    monkeypatch.setattr(costs.torch, "get_num_threads", lambda: 99)
    paths.append(CostCache("cpu", tmp_path).path)
    monkeypatch.setattr(costs.torch, "__version__", "9.9")
    paths.append(CostCache("cpu", tmp_path).path)
    assert len(set(paths)) == 4
    assert all(path.parent == tmp_path and " " not in path.name for path in paths)


def test_the_file_is_the_same_whatever_the_order(cache: CostCache) -> None:
    cache.save({"b": ONE, "a": TWO})
    assert list(json.loads(cache.path.read_text().partition("\n")[2])["costs"]) == ["a", "b"]


@pytest.mark.parametrize("damage", ["8", "1e999", "-3", "[" * 100_000])
def test_a_number_that_was_not_measured_is_not_believed(tmp_path, damage) -> None:
    cache = CostCache("cpu", tmp_path)
    cache.save({"call": OperatorCost(workspace_bytes=7777777, output_bytes=(1,))})
    cache.path.write_text(cache.path.read_text().replace("7777777", damage, 1))
    assert cache.load() == {}


def test_what_another_process_wrote_is_seen(tmp_path):
    one, other = CostCache("cpu", tmp_path), CostCache("cpu", tmp_path)
    one.save({"a": OperatorCost(workspace_bytes=1, output_bytes=())})
    assert set(other.load()) == {"a"}
    content = one.path.read_text(encoding="utf-8")
    one.save({"b": OperatorCost(workspace_bytes=2, output_bytes=())})
    assert set(other.load()) == {"a", "b"}
    write_atomically(one.path, content)  # as another process does
    assert set(other.load()) == {"a"}
