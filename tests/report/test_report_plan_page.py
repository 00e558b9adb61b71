import base64
import dataclasses
import hashlib
import re

import pytest
from handmade_reports import make_profile
from handmade_story import STAGES, long_plan, plan_of_chain, without_step
from test_report_page import EVIL, Reader

from memfit.errors import InvalidFile
from memfit.plan.frontier import Frontier
from memfit.report import plan_page
from memfit.report.curve import points_of
from memfit.units import format_bytes


@pytest.fixture(scope="module")
def plan():
    return plan_of_chain(STAGES)


@pytest.fixture(scope="module")
def frontier(plan):
    return points_of(
        Frontier.of([plan, plan_of_chain(STAGES, dropped=(1, 2, 3, 4)), plan_of_chain(STAGES, dropped=())])
    )


def words_of(text):
    return " ".join("".join(Reader(text).words).split())


def test_every_element_is_closed_and_everything_is_said(plan, frontier):
    reader = Reader(plan_page.render(plan, frontier, make_profile(predicted_peak_bytes=plan.peak_bytes)))
    assert reader.open == []
    words = " ".join("".join(reader.words).split())
    for expected in (
        f"Fits {format_bytes(plan.budget_bytes)}",
        format_bytes(plan.unplanned_peak_bytes),
        "Memory through the step",
        "The step, played",
        "computed again",
        "The curve of memory against time",
        "Predicted against measured",
        "Highest memory by pass and module",
        "stage3",
        "+7.1%",
    ):
        assert expected in words, expected


def test_sections_without_content_are_not_there(plan):
    words = words_of(plan_page.render(plan))
    assert "The curve of memory against time" not in words
    assert "Predicted against measured" not in words


def test_the_page_needs_nothing_from_elsewhere(plan, frontier):
    text = plan_page.render(plan, frontier)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    for _, attributes in Reader(text).elements:
        assert not {"src", "href"} & attributes.keys()


def test_the_policy_allows_the_one_script_there_is(plan):
    reader = Reader(plan_page.render(plan))
    policy = next(attrs["content"] for tag, attrs in reader.elements if "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_names_are_text_and_never_markup():
    plan = plan_of_chain([EVIL, *STAGES], model=EVIL, sample=EVIL, log=(EVIL,), floor_operation=EVIL, device=EVIL)
    reader = Reader(plan_page.render(plan))
    assert len([tag for tag, _ in reader.elements if tag == "script"]) == 2
    assert not [tag for tag, _ in reader.elements if tag == "img"]
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]
    assert EVIL in reader.data()["stories"][0]["words"]
    assert "".join(reader.words).count(EVIL) >= 4  # as text it is shown whole


def test_the_data_are_both_tracks(plan):
    [story] = Reader(plan_page.render(plan)).data()["stories"]
    assert len(story["planned"]["label"]) == len(story["unplanned"]["label"]) + 2
    assert sum(story["planned"]["again"]) == 2
    assert len(story["tiles"]) == len(plan.fates)


def test_a_step_of_8000_operations_stays_below_two_megabytes():
    assert len(plan_page.render(long_plan())) < 2_000_000


def test_an_old_plan_is_shown_without_what_it_does_not_carry(plan):
    text = plan_page.render(without_step(plan))
    assert 'id="plot"' not in text
    assert "written without the step it was made for" in words_of(text)
    assert "stage3" in words_of(text)


def test_a_plan_in_regions_has_a_choice_of_them(plan):
    fates = tuple(dataclasses.replace(fate, module=f"one.{fate.module}") for fate in plan.fates)
    whole = dataclasses.replace(plan, step=None, fates=fates, regions={"one": plan, "two": plan})
    reader = Reader(plan_page.render(whole))
    assert [attrs["value"] for tag, attrs in reader.elements if tag == "option"][:2] == ["0", "1"]
    assert "one region at a time" in " ".join("".join(reader.words).split())


def test_a_plan_that_fits_unplanned_says_so():
    plan = plan_of_chain(STAGES, dropped=(), extra_us=0.0)
    assert "so nothing is computed again" in words_of(plan_page.render(plan))


def test_a_damaged_plan_is_refused(plan):
    with pytest.raises(InvalidFile, match="damaged plan"):
        plan_page.render(dataclasses.replace(plan, peak_bytes=3))


def test_the_page_is_the_same_every_time(plan):
    assert plan_page.render(plan) == plan_page.render(plan)


def test_light_dark_small_screens_stillness_and_paper_are_thought_of(plan):
    text = plan_page.render(plan)
    for expected in (
        "prefers-color-scheme: dark",
        'data-theme="dark"',
        "max-width: 560px",
        "prefers-reduced-motion",
        "@media print",
    ):
        assert expected in text
