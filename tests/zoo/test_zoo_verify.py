import dataclasses
import gzip
import shutil
import time

import pytest
from small_zoo import built, case_in

from memfit import zoo
from memfit.cli.zoo_build import subject_of
from memfit.zoo import store


@pytest.fixture(scope="module")
def small_zoo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    case = case_in(folder)
    made = built(case, folder / "plans")
    return case, folder / "plans", made


def without_weights(entry):
    return subject_of(entry).without_weights()


def verdicts(folder, entries, make=without_weights):
    return list(zoo.verify(entries, make, folder=folder))


def test_plans_are_built_for_every_device_and_only_once(small_zoo):
    case, folder, made = small_zoo
    assert made == ["net x512 on cpu", "net x512 on T4"]
    entries = store.read_index(folder)
    assert {each.device for each in entries} == {"cpu", "T4"}
    assert {each.times_measured for each in entries if each.device == "T4"} == {False}
    assert len(list(folder.glob("*.gz"))) == len(entries) + 1 >= 5  # and the sizes of the step on the CPU
    assert built(case, folder) == []
    assert store.read_index(folder) == entries


def test_what_is_missing_is_built(small_zoo, tmp_path):
    case, folder, _ = small_zoo
    store.write_index(tmp_path, [each for each in store.read_index(folder) if each.device == "T4"])
    assert built(dataclasses.replace(case, devices=("cpu",)), tmp_path) == ["net x512 on cpu"]
    assert {each.device for each in store.read_index(tmp_path)} == {"cpu", "T4"}


def test_stored_plans_hold_and_plans_of_one_step_share_a_capture(small_zoo):
    _, folder, _ = small_zoo
    captured = []

    def make(entry):
        captured.append(entry.device)
        return without_weights(entry)

    entries = store.read_index(folder)
    found = verdicts(folder, entries, make)
    assert [each.reason for each in found] == [""] * len(entries)
    assert sorted(captured) == ["T4", "cpu"]
    by_name = {each.name: each for each in entries}
    assert all(each.peak_bytes == by_name[each.name].peak_bytes for each in found)


def test_a_plan_with_another_peak_does_not_hold(small_zoo):
    _, folder, _ = small_zoo
    entry = dataclasses.replace(store.read_index(folder)[0], peak_bytes=1)
    (verdict,) = verdicts(folder, [entry])
    assert not verdict.holds
    assert "its peak is" in verdict.reason
    assert verdict.peak_bytes > 1


def test_a_plan_of_another_model_or_graph_does_not_hold(small_zoo):
    _, folder, _ = small_zoo
    entry = store.read_index(folder)[0]
    wider = dataclasses.replace(entry, reference=entry.reference.replace("()", "(32)"), inputs=("512x32",))
    (verdict,) = verdicts(folder, [wider])
    assert "other parameters" in verdict.reason
    bigger = dataclasses.replace(entry, inputs=("256x64",))
    (verdict,) = verdicts(folder, [bigger])
    assert "computes something else" in verdict.reason


def test_a_model_that_cannot_be_built_fails_all_plans_of_its_step_once(small_zoo):
    _, folder, _ = small_zoo
    tried = []

    def make(entry):
        tried.append(entry)
        return without_weights(dataclasses.replace(entry, reference="no_such_package:f"))

    entries = [each for each in store.read_index(folder) if each.device == "T4"]
    found = verdicts(folder, entries, make)
    assert len(found) == len(entries) > 1
    assert all("there is no module" in each.reason for each in found)
    assert len(tried) == 1


def test_sizes_that_are_missing_are_made_again(small_zoo, tmp_path):
    case, folder, _ = small_zoo
    shutil.copytree(folder, tmp_path / "plans")
    (sizes,) = (tmp_path / "plans").glob("*.sizes.json.gz")
    before = sizes.read_bytes()
    sizes.unlink()
    assert built(case, tmp_path / "plans") == ["sizes of net x512 on cpu"]
    assert sizes.read_bytes() == before


def test_damaged_sizes_are_refused(small_zoo, tmp_path):
    _, folder, _ = small_zoo
    shutil.copytree(folder, tmp_path / "plans")
    (sizes,) = (tmp_path / "plans").glob("*.sizes.json.gz")
    sizes.write_bytes(gzip.compress(b'{"format": "memfit.zoo.sizes", "version": 2}'))
    entries = [each for each in store.read_index(folder) if each.device == "cpu"]
    assert all("damaged sizes" in each.reason for each in verdicts(tmp_path / "plans", entries))


@pytest.mark.slow
def test_the_whole_zoo_holds_in_two_minutes():
    start = time.monotonic()
    found = list(zoo.verify(zoo.entries(), without_weights))
    assert [each.name for each in found if not each.holds] == []
    assert time.monotonic() - start < 120
