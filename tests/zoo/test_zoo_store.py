import dataclasses
import json

import pytest

import memfit
from memfit import zoo
from memfit.errors import InfeasibleBudget, InvalidBudget, InvalidFile, InvalidInput
from memfit.zoo import store
from memfit.zoo.catalog import CASES


def test_every_listed_plan_opens_and_is_what_the_list_says():
    assert len({each.name for each in zoo.entries()}) == len(zoo.entries()) > 40
    for entry in zoo.entries():
        plan = zoo.open_plan(entry.name)
        assert (plan.peak_bytes, plan.budget_bytes) == (entry.peak_bytes, entry.budget_bytes)
        assert plan.peak_bytes <= plan.budget_bytes
        assert plan.program.graph_digest == entry.graph_digest
        assert plan.times_measured == entry.times_measured == (entry.device == "cpu")


def test_every_file_is_listed_and_every_case_has_plans():
    files = {each.name for each in store.own_folder().iterdir() if each.name.endswith(".gz")}
    sizes = {f"{each.step_name}.sizes.json.gz" for each in zoo.entries() if each.device == "cpu"}
    assert files == {f"{each.name}.json.gz" for each in zoo.entries()} | sizes
    listed = {(each.model, each.batch_size, each.device) for each in zoo.entries()}
    assert listed == {(case.name, case.batch_size, device) for case in CASES for device in case.devices}


def test_the_zoo_is_small():
    assert sum(len(each.read_bytes()) for each in store.own_folder().iterdir() if each.is_file()) < 3 * 2**20


def test_the_plan_that_fills_the_budget_best_is_loaded():
    t4 = [each for each in zoo.entries() if (each.model, each.device) == ("resnet50", "T4")]
    assert len(t4) > 2
    for entry in t4:
        exactly = zoo.load("resnet50", budget=entry.peak_bytes, device="t4")
        a_little_more = zoo.load("resnet50", budget=entry.peak_bytes + 1, device="T4", batch_size=184)
        assert exactly.peak_bytes == a_little_more.peak_bytes == entry.peak_bytes
    smallest = zoo.load("resnet50", budget="smallest", device="T4")
    assert smallest.peak_bytes == min(each.peak_bytes for each in t4)


def test_budgets_are_bytes_or_shares_of_the_unplanned_peak():
    plan = zoo.load("resnet50", budget="10.1GiB", batch_size=184, device="T4")
    assert plan.peak_bytes <= 10.1 * 2**30
    assert not plan.times_measured
    share = zoo.load("resnet50", budget=0.7, batch_size=184, device="T4")
    assert share.peak_bytes <= 0.7 * share.unplanned_peak_bytes


def test_a_budget_that_no_plan_is_within_is_answered_with_what_there_is():
    with pytest.raises(InfeasibleBudget, match=r"within 1MiB; there are resnet50-x16-cpu-0.66 \(.*MiB\)") as refused:
        zoo.load("resnet50", budget="1MiB", device="cpu")
    assert refused.value.smallest_bytes > 2**20


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"model": "resnet5", "budget": "1GiB"}, r"no 'resnet5' \(did you mean resnet50\?\); it has .*vgg16"),
        ({"model": "resnet50", "budget": "1GiB", "batch_size": 7}, "at batch size 7; there are resnet50-x16"),
        ({"model": "vgg16", "budget": "1GiB", "device": "H200"}, "on H200; there are"),
        ({"model": "vgg16", "budget": "1GiB", "device": "T5"}, "device 'T5' is not known"),
        ({"model": "vgg16", "budget": None}, "there is no budget"),
        ({"model": "vgg16", "budget": "1GoB"}, "unknown unit"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(arguments, complaint):
    with pytest.raises((InvalidInput, InvalidBudget), match=complaint):
        zoo.load(**arguments)


def test_an_unknown_plan_is_answered_with_the_nearest():
    with pytest.raises(InvalidInput, match=r"did you mean resnet50-x16-cpu-0.50"):
        zoo.open_plan("resnet50-x16-cpu-0.5")


def test_a_damaged_plan_is_refused(tmp_path):
    entry = zoo.entries()[0]
    whole = (store.own_folder() / f"{entry.name}.json.gz").read_bytes()
    damaged = tmp_path / f"{entry.name}.json.gz"
    for content in (whole[:-30], b"no gzip", b""):
        damaged.write_bytes(content)
        with pytest.raises(InvalidFile):
            store.read_plan(tmp_path, entry)


def test_the_same_plan_gives_the_same_bytes(tmp_path):
    entry = zoo.entries()[0]
    store.write_plan(tmp_path, entry.name, zoo.open_plan(entry.name))
    file = f"{entry.name}.json.gz"
    assert (tmp_path / file).read_bytes() == (store.own_folder() / file).read_bytes()


def test_a_list_comes_back_as_it_was_and_a_foreign_one_is_refused(tmp_path):
    store.write_index(tmp_path, zoo.entries())
    assert store.read_index(tmp_path) == zoo.entries()
    assert store.read_index(tmp_path / "nowhere") == ()
    content = json.loads((tmp_path / "index.json").read_text())
    for change in ({"version": 2}, {"format": "other"}, {"plans": [{"name": "x"}]}):
        (tmp_path / "index.json").write_text(json.dumps(content | change))
        with pytest.raises(InvalidFile, match="cannot be read"):
            store.read_index(tmp_path)


def test_the_options_that_name_a_step_are_said():
    entry = dataclasses.replace(
        zoo.entries()[0], reference="a:B()", inputs=("2x3",), dtype="bfloat16", outputs="loss", optimizer="adamw"
    )
    expected = '--model "a:B()" --input 2x3 --optimizer adamw --outputs loss --dtype bfloat16'
    assert entry.command() == expected


def test_the_zoo_is_part_of_the_package():
    assert memfit.zoo is zoo
