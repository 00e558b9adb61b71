"""A plan as data: written, read, refused, printed, compared."""

import dataclasses
import json
import math

import pytest
from handmade import KIB, Case, Layer, Step, training
from handmade_plan import SIZE, chain, make_plan, plan_of, program_dropping

from memfit.errors import InvalidFile
from memfit.ir import Compute, Free, Program
from memfit.plan.frontier import Frontier, activation_fraction
from memfit.plan.plan import Fate, Plan, Treatment, _checksum, fates_of
from memfit.units import format_bytes


@pytest.fixture(scope="module")
def plan():
    return make_plan("b")


def rewritten(plan, **changes):
    """A plan file whose content was changed, with a checksum that is right again."""
    content = json.loads(plan.to_json())
    content.pop("checksum")
    content |= changes
    return json.dumps(content | {"checksum": _checksum(content)})


# Figures


def test_figures_are_fractions_of_the_step(plan):
    assert plan.slowdown == pytest.approx(0.05)
    assert plan.lower_bound == pytest.approx(0.04)
    assert plan.gap == pytest.approx(0.01)


def test_a_plan_that_is_faster_than_eager_has_no_gap():
    assert make_plan(extra_us=-10.0, bound_us=0.0).gap == 0.0


def test_a_step_without_time_has_no_slowdown():
    plan = make_plan(step_us=0.0, extra_us=0.0, bound_us=0.0)
    assert (plan.slowdown, plan.lower_bound) == (0.0, 0.0)


def test_what_is_sent_out_of_a_gpu_takes_pinned_blocks_of_powers_of_two(plan):
    sent = Fate(value="a", module="", size_bytes=100 * KIB, treatment=Treatment.MOVED, technique="offload")
    kept = dataclasses.replace(sent, treatment=Treatment.KEPT)
    assert dataclasses.replace(plan, device="cuda:0", fates=(sent, sent, kept)).pinned_bytes == 2 * 128 * KIB
    assert dataclasses.replace(plan, device="cpu", fates=(sent,)).pinned_bytes == 0


def test_a_plan_that_keeps_everything_is_the_unplanned_step(plan):
    assert make_plan().is_identity
    assert not plan.is_identity


# Fates


def treatments(fates):
    return {fate.value: fate.treatment for fate in fates}


def test_what_is_not_kept_is_computed_again(plan):
    assert treatments(plan.fates) == {"a": Treatment.KEPT, "b": Treatment.AGAIN, "c": Treatment.KEPT}
    assert {fate.value: fate.runs_again for fate in plan.fates} == {"a": 0, "b": 1, "c": 0}
    assert plan.by_module(1)["b"][Treatment.AGAIN] == SIZE


def with_packed_form() -> Case:
    return training(
        {"a": 4 * SIZE, "a_bits": SIZE, "out": SIZE},
        [
            Layer(Step("first", reads="x", makes="a")),
            Layer(Step("last", reads="a", makes="out"), saves="a", lean_saves="a_bits"),
        ],
        alternatives=[Step("pack", reads="a", makes="a_bits"), Step("unpack", reads="a_bits", makes="a")],
    )


def without_frees(case: Case, forward: list[str], backward: list[str]) -> Program:
    """A program of operations by name; only what it runs is looked at here."""
    names = [each.name for each in (*case.graph.operations, *case.graph.alternatives)]
    runs = [tuple(Compute(names.index(name)) for name in part) for part in (forward, backward)]
    return Program(graph_digest=case.graph.digest(), forward=runs[0], backward=runs[1])


@pytest.mark.parametrize("backward", [["unpack", "back_last", "back_first"], ["lean_last", "back_first"]])
def test_what_is_kept_in_a_smaller_form_is_replaced(backward):
    case = with_packed_form()
    program = without_frees(case, ["first", "pack", "last"], backward)
    program = dataclasses.replace(program, forward=(*program.forward, Free(1)))
    assert treatments(fates_of(case.graph, program)) == {"a": Treatment.REPLACED}


# Files


def test_a_plan_is_the_same_after_a_round_trip(plan, tmp_path):
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "deep" / "plan.json")
    assert Plan.load(tmp_path / "deep" / "plan.json") == plan


def test_a_plan_without_budget_and_optimizer_is_read_too():
    plan = make_plan(budget_bytes=None, optimizer=None)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_refused(plan, share):
    text = plan.to_json()
    with pytest.raises(InvalidFile, match="not whole JSON"):
        Plan.from_json(text[: int(share * len(text))])


def test_an_edited_file_is_refused(plan):
    with pytest.raises(InvalidFile, match="checksum differs"):
        Plan.from_json(plan.to_json().replace('"peak_bytes":593920', '"peak_bytes":1'))


@pytest.mark.parametrize("version", [0, 8, None, "1", True])
def test_another_version_is_refused_by_number(plan, version):
    with pytest.raises(InvalidFile, match=f"version {version!r} was found, this memfit reads versions 1 to 7"):
        Plan.from_json(rewritten(plan, version=version))


def in_regions(plan):
    return dataclasses.replace(plan, regions={"block": plan}, left_eager={"": "it asks", "head": "it keeps little"})


def test_a_plan_in_regions_is_the_same_after_a_round_trip(plan):
    assert Plan.from_json(in_regions(plan).to_json()) == in_regions(plan)


def test_only_a_plan_in_regions_is_of_the_new_version(plan):
    versions = [json.loads(each.to_json())["version"] for each in (plan, in_regions(plan))]
    assert versions == [1, 2]
    assert "regions" not in json.loads(plan.to_json())


def test_a_plan_says_how_gradients_reach_its_regions(plan):
    region = dataclasses.replace(plan, starts=((0, 2, 1), None, ()))
    whole = dataclasses.replace(plan, regions={"block": region})
    assert json.loads(whole.to_json())["version"] == 7
    assert Plan.from_json(whole.to_json()) == whole


def test_a_damaged_region_is_refused(plan):
    content = json.loads(in_regions(plan).to_json())
    for damage in ({"peak_bytes": "much"}, {"program": {}}, {"fates": 3}):
        regions = {"block": content["regions"]["block"] | damage}
        with pytest.raises(InvalidFile):
            Plan.from_json(rewritten(in_regions(plan), regions=regions))


def test_a_plan_in_regions_says_what_is_left_eager_and_why(plan):
    text = str(in_regions(plan))
    assert "planned by regions: block" in text
    assert "left eager: the model itself, because it asks" in text
    assert "left eager: head, because it keeps little" in text
    assert "at best" not in text  # nothing is known about what is left eager


def test_a_region_of_one_plan_alone_is_a_difference(plan):
    assert "block: a region in the first plan alone" in in_regions(plan).diff(plan)
    assert "block: a region in the second plan alone" in plan.diff(in_regions(plan))


@pytest.mark.parametrize("text", ["[]", "3", '{"format": "memfit.graph", "version": 1}', "null"])
def test_another_format_is_refused(text):
    with pytest.raises(InvalidFile, match="not a plan"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": 3},
        {"peak_bytes": "many"},
        {"peak_bytes": None},
        {"peak_bytes": True},
        {"fates": [{"value": "a"}]},
        {"fates": 3},
        {"program": {}},
        {"program": None},
        {"log": None},
        {"no_such_field": 1},
    ],
)
def test_a_damaged_plan_is_refused(plan, changes):
    with pytest.raises(InvalidFile):
        Plan.from_json(rewritten(plan, **changes))


def test_a_missing_field_is_refused(plan):
    content = json.loads(plan.to_json())
    del content["checksum"], content["floor_bytes"]
    with pytest.raises(InvalidFile, match="floor_bytes"):
        Plan.from_json(json.dumps(content | {"checksum": _checksum(content)}))


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidFile, match=r"plan\.json"):
        Plan.load(path)


# Words


def test_a_printed_plan_says_what_happens_where(plan):
    text = str(plan)
    for words in ("Net on cpu", "budget 600.00 KiB", "predicted peak 580.00 KiB", "+5.0% time", "at best +4.0%"):
        assert words in text
    assert "  b: 100.00 KiB computed again" in text
    assert "(estimated)" not in text
    assert "(estimated)" in str(dataclasses.replace(plan, times_measured=False))


def test_a_plan_explains_what_lost_and_why(plan):
    text = plan.explain()
    over = format_bytes(plan.unplanned_peak_bytes - plan.budget_bytes)
    for words in (f"over the budget by {over}", "+4.0% time at best", plan.floor_operation, "were allowed: "):
        assert words in text


def test_a_printed_plan_that_keeps_everything_says_so():
    assert "nothing is computed again" in str(make_plan())
    assert "no budget" in str(make_plan("b", budget_bytes=None))


def test_two_plans_are_compared_by_what_differs(plan):
    other = make_plan("c", budget_bytes=500 * KIB, peak_bytes=480 * KIB, extra_us=100.0)
    lines = plan.diff(other).splitlines()
    assert lines == [
        "budget: 600.00 KiB -> 500.00 KiB",
        "predicted peak: 580.00 KiB -> 480.00 KiB",
        "predicted slowdown: 5.0% -> 10.0%",
        "b b (100.00 KiB): computed again -> kept",
        "c c (100.00 KiB): kept -> computed again",
    ]


def test_a_plan_does_not_differ_from_itself(plan):
    assert plan.diff(plan) == ""


def test_plans_of_different_graphs_say_so(plan):
    case = chain("a", "b")
    other = plan_of(case, program_dropping(case))
    assert "different graphs" in plan.diff(other)


# The curve


def test_the_activation_part_is_what_the_peak_has_beyond_what_persists(plan):
    assert activation_fraction(plan) == pytest.approx((580 - 200) / (1000 - 200))
    assert activation_fraction(dataclasses.replace(plan, persistent_bytes=1000 * KIB)) == 1.0


def at(budget, extra_us, **changes):
    return make_plan("b", budget_bytes=budget * KIB, peak_bytes=budget * KIB, extra_us=extra_us, **changes)


def test_a_curve_is_sorted_and_a_faster_plan_of_a_smaller_budget_serves_the_bigger_one():
    curve = Frontier.of([at(900, 70.0, bound_us=60.0), at(500, 100.0), at(700, 40.0, bound_us=30.0)])
    assert [plan.budget_bytes // KIB for plan in curve] == [900, 700, 500]
    assert [plan.extra_us for plan in curve] == [40.0, 40.0, 100.0]
    assert [plan.peak_bytes // KIB for plan in curve] == [700, 700, 500]
    assert all(plan.bound_us <= plan.extra_us for plan in curve)


def test_a_curve_in_words_and_numbers():
    curve = Frontier.of([at(900, 10.0), at(500, 100.0)])
    assert "500.00 KiB" in str(curve).splitlines()[1]
    written = json.loads(curve.to_json())
    assert [point["slowdown"] for point in written["points"]] == [0.01, 0.1]
    assert not any(math.isnan(point["activation_fraction"]) for point in written["points"])


def test_a_fate_is_plain_data():
    fate = Fate(value="a", module="m", size_bytes=1, treatment=Treatment.KEPT)
    assert dataclasses.asdict(fate)["technique"] == ""


def test_the_peak_of_the_process_is_kept_and_shown(plan):
    with_process = dataclasses.replace(plan, process_peak_bytes=3 * 2**30)
    assert json.loads(with_process.to_json())["version"] == 4
    assert Plan.from_json(with_process.to_json()) == with_process
    assert "3.00 GiB of the process" in str(with_process)
    assert "process" not in str(plan)
    assert "process_peak_bytes" not in json.loads(plan.to_json())


def test_a_peak_of_the_process_that_is_no_number_is_refused(plan):
    with pytest.raises(InvalidFile, match="process_peak_bytes"):
        Plan.from_json(rewritten(plan, version=4, process_peak_bytes="much"))
