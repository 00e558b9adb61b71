import dataclasses

import pytest
from handmade_estimate import make_estimate
from handmade_story import STAGES, plan_of_chain, without_step
from test_report_page import EVIL, Reader

from memfit.display import html_of
from memfit.plan.frontier import Frontier
from memfit.units import format_bytes


def shown():
    plan = plan_of_chain(STAGES)
    return [make_estimate(STAGES), plan, Frontier.of([plan, plan_of_chain(STAGES, dropped=(1, 2, 3, 4))])]


@pytest.mark.parametrize("index", range(3))
def test_objects_show_themselves_in_a_notebook(index):
    text = shown()[index]._repr_html_()
    reader = Reader(text)
    assert reader.open == []
    assert reader.scripts == []
    assert len(text) < 40_000
    assert not {tag for tag, _ in reader.elements} & {"script", "style", "link", "img", "html", "body"}


def test_the_figures_are_there():
    estimate, plan, frontier = shown()
    assert format_bytes(estimate.peak_bytes) in estimate._repr_html_()
    for size_bytes in (plan.peak_bytes, plan.unplanned_peak_bytes, plan.budget_bytes):
        assert format_bytes(size_bytes) in plan._repr_html_()
    assert all(format_bytes(each.peak_bytes) in frontier._repr_html_() for each in frontier)


def test_names_are_text_and_never_markup():
    for each in (make_estimate([EVIL], model=EVIL), plan_of_chain([EVIL, *STAGES], model=EVIL, sample=EVIL)):
        reader = Reader(each._repr_html_())
        assert not [tag for tag, _ in reader.elements if tag in ("script", "img")]
        assert EVIL in "".join(reader.words)


def test_plans_without_a_timeline_and_empty_frontiers_are_shown_too():
    plan = plan_of_chain(STAGES)
    assert "<svg" in plan._repr_html_()
    for each in (without_step(plan), dataclasses.replace(plan, peak_bytes=3)):
        assert "<svg" not in each._repr_html_()
    assert "no points" in Frontier(())._repr_html_()


def test_what_nobody_registered_is_left_to_its_text():
    assert html_of(object()) is None
