import json

import pytest
from handmade_reports import FATES, MIB, fate, make_plan

from memfit.plan.plan import Treatment
from memfit.report import plan_summary


def test_every_figure_is_there():
    figures = {figure.label: figure for figure in plan_summary.figures(make_plan())}
    assert {label: figure.value for label, figure in figures.items()} == {
        "budget": "12.00 MiB",
        "predicted peak": "11.00 MiB",
        "unplanned peak": "20.00 MiB",
        "floor": "5.00 MiB",
        "predicted slowdown": "+6.4%",
        "lower bound": "+3.1%",
        "gap": "3.3 points",
        "plan time": "1.2 s",
    }
    assert figures["predicted peak"].remark == "55% of the unplanned peak"
    assert "aten.convolution_backward.default in layers.0.conv" in figures["floor"].remark
    assert figures["predicted slowdown"].remark == "times measured here"


def test_a_plan_by_hand_has_no_budget_and_no_bound():
    labels = [figure.label for figure in plan_summary.figures(make_plan(budget_bytes=None, times_measured=False))]
    assert labels == ["predicted peak", "unplanned peak", "floor", "predicted slowdown", "plan time"]


def test_equal_blocks_are_one_row():
    rows = {row.label: row.sizes for row in plan_summary.module_rows(make_plan(), depth=2)}
    assert list(rows) == ["stem", "layers.0-1,3", "layers.2", "(outside of modules)"]
    assert rows["layers.0-1,3"][Treatment.AGAIN] == 3 * MIB
    assert rows["layers.0-1,3"][Treatment.KEPT] == 3 * MIB
    assert rows["layers.2"][Treatment.REPLACED] == MIB


def test_rows_add_up_to_the_totals_however_few_are_shown():
    plan = make_plan(fates=tuple(fate(f"part{'x' * n}", Treatment.KEPT, n + 1) for n in range(30)))
    for top in (1, 5, 28, 29, 30, 100):
        rows = plan_summary.module_rows(plan, top=top)
        assert sum(row.sizes[Treatment.KEPT] for row in rows) == plan_summary.totals(plan)[Treatment.KEPT]
        assert len(rows) <= top + 1


def test_depth_is_at_least_two_names_and_more_where_that_tells_nothing():
    assert plan_summary.automatic_depth(make_plan()) == 2
    deep = tuple(fate(f"model.encoder.{number}.{part}", Treatment.KEPT) for number in range(6) for part in "ab")
    assert plan_summary.automatic_depth(make_plan(fates=deep)) == 3
    assert plan_summary.automatic_depth(make_plan(fates=())) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fates": FATES[:1]}, "the unplanned step fits the budget"),
        ({"log": ("0.1 s: interrupted: the best plan so far",)}, "interrupted"),
        ({"rewrites": ("chunk",)}, "chunk"),
        ({"allow": ("8-bit",), "fates": (fate("a", Treatment.REPLACED, MIB, "8-bit"),)}, "fewer bits (8-bit)"),
    ],
)
def test_what_a_reader_should_know_is_noted(changes, words):
    assert any(words in note for note in plan_summary.notes(make_plan(**changes)))


def test_there_is_nothing_to_note_about_a_plain_plan():
    assert plan_summary.notes(make_plan()) == []
    assert plan_summary.notes(make_plan(allow=("recompute", "8-bit"))) == []


def test_the_step_in_words():
    assert plan_summary.step_words(make_plan()) == "Net, training step with adamw, on cpu"
    assert plan_summary.step_words(make_plan(optimizer=None)) == "Net, forward and backward, on cpu"


def test_the_summary_has_all_figures_and_no_program():
    summary = json.loads(plan_summary.summary_json(make_plan(), depth=1))
    assert summary["peak_bytes"] == 11 * MIB
    assert summary["slowdown"] == 0.064
    assert summary["activations"]["computed again"] == 3 * MIB
    assert summary["techniques"] == {"bits": MIB}
    assert set(summary["modules"]) == {"stem", "layers", ""}
    assert not {"program", "fates"} & set(summary)
