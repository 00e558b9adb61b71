"""The page of a diagnosis in a real browser. Skipped, and said so, where there is none."""

import os
from pathlib import Path

import pytest
from browser import Browser, find_chromium, opened
from gpu_truth import TRACES, needs_records
from recorded_training import refused

from memfit.doctor.diagnosis import diagnose
from memfit.doctor.read import read_file, read_histories
from memfit.report import doctor_page
from memfit.units import format_bytes

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="there is no Chromium here: install it, or name it in MEMFIT_CHROMIUM"
)

DIAGNOSIS = diagnose(refused())
SIZES = {"light": {}, "dark": {"dark": True}, "phone": {"width": 360, "height": 780}}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    process = Browser(tmp_path_factory.mktemp("profile"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    target = tmp_path_factory.mktemp("doctor") / "doctor.html"
    target.write_text(doctor_page.render(DIAGNOSIS), encoding="utf-8")
    return target


@pytest.fixture
def page(browser, path):
    with opened(browser, path) as page:
        yield page
        assert page.complaints() == []


@pytest.mark.parametrize("kind", SIZES)
def test_it_is_drawn_without_complaints_and_no_wider_than_the_screen(browser, path, tmp_path, kind):
    with opened(browser, path, **SIZES[kind]) as page:
        picture = page.screenshot(Path(os.environ.get("MEMFIT_SCREENSHOTS", tmp_path)) / f"doctor-{kind}.png")
        assert picture.stat().st_size > 20_000
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints() == []


def test_it_begins_at_the_peak(page):
    assert page.text("at-allocated") == format_bytes(DIAGNOSIS.peak_bytes)
    assert page.text("at-position").startswith(f"{DIAGNOSIS.peak_position + 1:,} of")


def test_keys_and_pointers_move_through_the_events(page):
    page.run("document.getElementById('plot').focus()")
    page.key("End")
    assert "is refused 90.00 MiB" in page.text("at-event")
    page.key("Home")
    assert page.text("at-position").startswith("1 of")
    page.key("p")
    assert page.text("at-allocated") == format_bytes(DIAGNOSIS.peak_bytes)
    page.mouse("mouseMoved", *page.middle("#plot"))
    assert page.text("at-allocated") != format_bytes(DIAGNOSIS.peak_bytes)


def test_a_segment_says_what_is_free_in_it(page):
    page.mouse("mouseMoved", *page.middle(".segments g"))
    assert "pool" in page.text("segment-words")
    assert "in one piece" in page.text("segment-words")


def test_the_theme_is_a_choice(page):
    before = page.run("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    assert page.text("theme") == "Theme: dark"
    assert page.run("getComputedStyle(document.body).backgroundColor") != before
    page.click("#theme")


@needs_records
@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name.removesuffix(".json.gz"))
def test_the_page_of_a_real_record_is_drawn_without_complaints(browser, tmp_path, trace):
    (history,) = read_histories(read_file(trace), trace.name)
    diagnosis = diagnose(history)
    target = tmp_path / "page.html"
    target.write_text(doctor_page.render(diagnosis), encoding="utf-8")
    with opened(browser, target) as page:
        assert page.text("at-allocated") == format_bytes(diagnosis.peak_bytes)
        assert page.run("document.querySelectorAll('.segments g').length") == len(diagnosis.segments)
        assert page.complaints() == []
