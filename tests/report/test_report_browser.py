"""The page in a real browser. Skipped, and said so, where there is none."""

import json
import os
from pathlib import Path

import pytest
from browser import Browser, find_chromium, opened
from handmade_estimate import make_estimate
from handmade_reports import make_profile
from handmade_story import STAGES, long_plan, plan_of_chain, without_step
from test_report_page import EVIL

from memfit.plan.frontier import Frontier
from memfit.report import page as estimate_page
from memfit.report import plan_page
from memfit.report.curve import points_of
from memfit.report.story import stories_of
from memfit.report.tiles import State, Tiles
from memfit.units import format_bytes

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="there is no Chromium here: install it, or name it in MEMFIT_CHROMIUM"
)

PLAN = plan_of_chain([*STAGES, EVIL], model="Net & <Co>")
SIZES = {"light": {}, "dark": {"dark": True}, "phone": {"width": 360, "height": 780}}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    process = Browser(tmp_path_factory.mktemp("profile"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    others = [plan_of_chain([*STAGES, EVIL], dropped=each) for each in ((1,), (1, 2, 3, 4))]
    profile = make_profile(predicted_peak_bytes=PLAN.peak_bytes)
    target = tmp_path_factory.mktemp("report") / "report.html"
    target.write_text(plan_page.render(PLAN, points_of(Frontier.of([PLAN, *others])), profile), encoding="utf-8")
    return target


@pytest.fixture
def page(browser, path):
    with opened(browser, path) as page:
        yield page
        assert page.complaints() == []


def position(page):
    return page.run("Number(document.getElementById('slider').value)")


@pytest.mark.parametrize("kind", SIZES)
def test_it_is_drawn_without_complaints_and_no_wider_than_the_screen(browser, path, tmp_path, kind):
    with opened(browser, path, **SIZES[kind]) as page:
        # MEMFIT_SCREENSHOTS keeps the pictures, for people to look at.
        picture = page.screenshot(Path(os.environ.get("MEMFIT_SCREENSHOTS", tmp_path)) / f"report-{kind}.png")
        assert picture.stat().st_size > 20_000
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        colours = "(() => { const area = document.getElementById('chart'), pen = area.getContext('2d');"
        colours += (
            "return new Set(new Uint32Array(pen.getImageData(0, 0, area.width, area.height).data.buffer)).size; })()"
        )
        assert page.run(colours) > 8
        assert page.complaints() == []


def test_it_begins_at_the_peak_and_says_what_is_live_and_who_owns_it(page):
    assert page.text("at-planned") == format_bytes(PLAN.peak_bytes)
    assert page.text("at-pass")
    assert "stage" in page.text("owners")
    assert "computed again" in page.text("kinds")


def test_names_stay_text(page):
    assert page.run("document.scripts.length") == 2
    assert page.run("document.images.length") == 0
    assert page.run("document.querySelector('h1').textContent") == "Net & <Co>"
    assert EVIL in page.run("document.getElementById('modules').textContent")


def test_the_arrow_keys_move_and_space_plays(page):
    page.run("document.getElementById('plot').focus()")
    page.key("Home")
    assert position(page) == 0
    assert page.text("at-position").startswith("1 of ")
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert position(page) == 2
    page.key("ArrowLeft")
    assert position(page) == 1
    page.key("End")
    assert page.text("at-pass") == "optimizer"
    assert page.run("document.getElementById('plot').getAttribute('aria-valuetext')").endswith("optimizer, step")
    page.key("p", text="p")
    assert page.text("at-planned") == format_bytes(PLAN.peak_bytes)
    page.key(" ", text=" ")
    assert page.text("play") == "Pause"
    page.key("ArrowLeft")
    assert page.text("play") == "Play"


def test_everything_can_be_reached_with_the_tab_key(page):
    reached = set()
    for _ in range(60):
        page.key("Tab")
        reached.add(
            page.run("document.activeElement.id || document.activeElement.name || document.activeElement.tagName")
        )
    assert {"theme", "front", "axis", "to-peak", "plot", "play", "slider", "speed"} <= reached


def test_play_and_pause(page):
    page.run("document.getElementById('speed').value = '4'")
    page.run("document.getElementById('plot').focus()")
    page.key("Home")
    page.click("#play")
    page.wait_for("Number(document.getElementById('slider').value) >= 2")
    page.click("#play")
    stopped = position(page)
    assert page.text("play") == "Play"
    page.run("new Promise((done) => setTimeout(done, 300))")
    assert position(page) == stopped


def test_it_plays_to_the_end_and_begins_again(page):
    page.run("document.getElementById('slider').focus()")
    page.key("End")
    last = position(page)
    page.key("ArrowLeft")
    page.run("document.getElementById('speed').value = '4'")
    page.click("#play")
    page.wait_for("document.getElementById('play').textContent === 'Play'")
    assert position(page) == last
    page.click("#play")
    page.wait_for(f"Number(document.getElementById('slider').value) < {last}")


def test_the_chart_and_the_slider_can_be_dragged(page):
    x, y = page.middle("#plot")
    page.drag((x, y), (x - 200, y))
    before = position(page)
    page.drag((x, y), (x + 250, y))
    assert position(page) > before
    x, y = page.middle("#slider")
    width = page.run("document.getElementById('slider').getBoundingClientRect().width")
    page.drag((x, y), (x - width / 2 + 12, y))
    assert position(page) <= 1


def test_pointing_and_touching_move_too(page):
    x, y = page.middle("#plot")
    page.mouse("mouseMoved", x - 300, y)
    before = position(page)
    page.mouse("mouseMoved", x + 300, y)
    pointed = position(page)
    assert pointed > before
    page.touch(x - 300, y)
    assert position(page) == before


def test_either_step_can_be_stacked_and_the_axis_can_be_time(page):
    total = page.text("at-position")
    page.click("input[value=unplanned]")
    assert page.text("at-position") != total
    page.click("input[value=time]")
    assert "at " in page.text("at-position")


def test_tables_are_sorted_by_their_heads(page):
    cells = "[...document.querySelectorAll('#values tbody tr')].map((row) => row.cells[0].textContent)"
    page.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    page.click("#values th:first-child button")
    assert page.run(cells) == sorted(page.run(cells), key=str.lower)
    page.click("#values th:first-child button")
    assert page.run("document.querySelector('#values th').getAttribute('aria-sort')") == "descending"
    assert page.run(cells)[0] != sorted(page.run(cells), key=str.lower)[0]
    page.run("const f = document.getElementById('filter'); f.value = 'stage2'; f.dispatchEvent(new Event('input'))")
    assert page.run("[...document.querySelectorAll('#values tbody tr')].filter((row) => !row.hidden).length") == 1


def test_light_and_dark_can_be_chosen(page):
    seen = []
    for _ in range(3):
        page.click("#theme")
        seen.append((page.text("theme"), page.run("getComputedStyle(document.body).backgroundColor")))
    assert [words for words, _ in seen] == ["Theme: light", "Theme: dark", "Theme: auto"]
    assert seen[0][1] == seen[2][1] != seen[1][1]


def test_tiles_are_what_the_film_shows(page):
    """The script and Python agree about every value at every moment."""
    [story] = stories_of(PLAN)
    tiles = Tiles(story, PLAN)
    page.run("document.getElementById('plot').focus()")
    page.key("Home")
    for index, place in enumerate(story.planned.places):
        beside = max(number for number, each in enumerate(story.unplanned.places) if each <= place)
        for name, states in (("unplanned", tiles.unplanned(beside)), ("planned", tiles.planned(index, beside))):
            shown = [State.LIVE, State.BACK, State.DROPPED, State.SMALL, State.OUT]
            words = ", ".join(f"{states.count(each)} {each}" for each in shown if each in states) or "none yet"
            assert page.text(f"map-words-{name}") == words
        page.key("ArrowRight")


def test_motion_is_fine_where_it_is_wanted(browser, path):
    with opened(browser, path, still=False) as page:
        page.click("#play")
        page.run("new Promise((done) => setTimeout(done, 400))")
        assert page.complaints() == []


def test_plans_without_a_timeline_and_in_regions_work_too(browser, tmp_path):
    regions = {"one": PLAN, "two": plan_of_chain(STAGES)}
    for number, plan in enumerate((without_step(PLAN), without_step(plan_of_chain(STAGES, regions=regions)))):
        target = tmp_path / f"{number}.html"
        target.write_text(plan_page.render(plan), encoding="utf-8")
        with opened(browser, target) as page:
            if plan.regions:
                before = page.text("at-planned")
                page.run(
                    "const s = document.getElementById('story'); s.value = '1'; s.dispatchEvent(new Event('change'))"
                )
                assert page.text("at-planned") != before
            page.click("#theme")
            assert page.complaints() == []


def test_a_step_of_8000_operations_stays_quick(browser, tmp_path):
    target = tmp_path / "long.html"
    target.write_text(plan_page.render(long_plan()), encoding="utf-8")
    with opened(browser, target) as page:
        page.run("document.getElementById('plot').focus()")
        page.run("window.began = performance.now()")
        for _ in range(20):
            page.key("PageDown")
        # A generous limit: what is drawn anew at every move takes some milliseconds, on a busy machine more.
        assert page.run("(performance.now() - window.began) / 20") < 400
        assert page.complaints() == []


def test_the_page_of_an_estimate_works_in_a_browser(browser, tmp_path):
    target = tmp_path / "estimate.html"
    target.write_text(estimate_page.render(make_estimate([*STAGES, EVIL])), encoding="utf-8")
    with opened(browser, target) as page:
        page.run("document.getElementById('plot').focus()")
        page.key("Home")
        assert page.text("at-position").startswith("1 of ")
        assert page.complaints() == []


def test_the_driver_sees_complaints(browser, tmp_path):
    (tmp_path / "bad.html").write_text("<script>console.error('loud'); nothing_of_that_name()</script>")
    with opened(browser, tmp_path / "bad.html") as page:
        found = json.dumps(page.complaints())
    assert "loud" in found
    assert "nothing_of_that_name" in found
