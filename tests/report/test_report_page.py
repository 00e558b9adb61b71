import base64
import hashlib
import html.parser
import json
import re

import pytest
import torch
from handmade_estimate import make_estimate

import memfit
from memfit.report import page
from memfit.report.limit import Limit
from memfit.units import format_bytes

STAGES = [f"stage{i}" for i in range(1, 6)]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
_VOID = {"meta", "link", "br", "img", "input", "hr", "path"}


class Reader(html.parser.HTMLParser):
    """What a browser would make of the page: its elements, scripts and words."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.words, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.words).append(data)

    def data(self):
        return json.loads(self.scripts[0])


def test_every_element_is_closed_and_everything_is_said():
    estimate = make_estimate(STAGES, notes=("a note for readers",))
    reader = Reader(page.render(estimate))
    assert reader.open == []
    words = " ".join("".join(reader.words).split())
    for expected in (
        "Training step with sgd on cpu, batch 512 float32",
        "The peak is in the backward of stage5, operation backward_4.",
        f"peak {format_bytes(estimate.peak_bytes)}",
        "At the peak, by kind",
        "At the peak, by module",
        "stage3.weight",
        "net.py:4",
        "1,050",
        "a note for readers",
    ):
        assert expected in words, expected


def test_the_page_needs_nothing_from_elsewhere():
    text = page.render(make_estimate(STAGES), Limit.of("T4"))
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    for _, attributes in Reader(text).elements:
        assert not {"src", "href"} & attributes.keys()


def test_the_policy_allows_the_one_script_there_is():
    reader = Reader(page.render(make_estimate(STAGES)))
    policy = next(attrs["content"] for tag, attrs in reader.elements if "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert len(reader.scripts) == 2


def test_the_data_are_the_moments_of_the_step():
    estimate = make_estimate(STAGES)
    data = Reader(page.render(estimate)).data()
    assert data["count"] == len(data["points"]) == len(estimate.timeline.moments)
    assert [sum(point["sizes"]) for point in data["points"]] == [
        moment.live_bytes for moment in estimate.timeline.moments
    ]
    peak = data["points"][data["peak"]]
    assert sum(peak["sizes"]) == estimate.peak_bytes
    assert (peak["operation"], peak["module"]) == ("backward_4", "stage5")


def test_a_long_step_stays_a_small_file_with_its_exact_peak():
    estimate = make_estimate([f"layers.{i}" for i in range(5000)])
    text = page.render(estimate)
    data = Reader(text).data()
    assert len(text) < 1_000_000
    assert data["count"] == 10_001
    assert len(data["points"]) < 1000
    assert sum(data["points"][data["peak"]]["sizes"]) == estimate.peak_bytes


def test_names_are_text_and_never_markup():
    estimate = make_estimate([EVIL, *STAGES], model=EVIL, notes=(EVIL,))
    reader = Reader(page.render(estimate))
    assert len([tag for tag, _ in reader.elements if tag == "script"]) == 2
    assert not [tag for tag, _ in reader.elements if tag == "img"]
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]
    assert EVIL in [point["module"] for point in reader.data()["points"]]
    assert "".join(reader.words).count(EVIL) >= 3  # as text it is shown whole


@pytest.mark.parametrize(("device", "verdict"), [("1GiB", "fits"), ("1KiB", "too-big")])
def test_the_verdict_and_its_colour(device, verdict):
    estimate = make_estimate(STAGES)
    reader = Reader(page.render(estimate, Limit.of(device)))
    assert f"verdict {verdict}" in [attributes.get("class") for _, attributes in reader.elements]
    assert Limit.of(device).verdict(estimate.peak_bytes) in reader.words


def test_a_limit_is_drawn_or_said_to_be_above():
    estimate = make_estimate(STAGES)
    near, far = (page.render(estimate, Limit.of(device)) for device in (str(estimate.peak_bytes), "T4"))
    assert 'class="limit"' in near
    assert 'class="limit"' not in far
    assert "lies above this chart" in far


def test_the_chart_can_be_used_from_the_keyboard():
    text = page.render(make_estimate(STAGES))
    plot = next(attributes for _, attributes in Reader(text).elements if attributes.get("id") == "plot")
    assert (plot["tabindex"], plot["role"]) == ("0", "slider")
    assert int(plot["aria-valuemax"]) == 11
    assert plot["aria-valuetext"]
    for key in ("ArrowLeft", "ArrowRight", "Home", "End"):
        assert key in text


def test_the_page_is_the_same_every_time():
    assert page.render(make_estimate(STAGES)) == page.render(make_estimate(STAGES))


def test_light_dark_and_small_screens_are_thought_of():
    text = page.render(make_estimate(STAGES))
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert "max-width: 760px" in text


def test_ranges_and_what_other_loops_cost_are_on_the_page():
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU())
    estimate = memfit.estimate(model, torch.zeros(8, 64, 32, 32), optimizer="adamw", device="RTX 4090", progress=False)
    words = " ".join(" ".join(Reader(page.render(estimate, None)).words).split())
    assert "Allocated " in words
    assert "whose workspaces it does not publish" in words
    assert "In another loop: gradients kept +" in words
