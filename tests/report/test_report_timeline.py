import re

import pytest
from handmade_estimate import make_estimate

from memfit.ir import Kind
from memfit.plan.simulate import Moment
from memfit.report import timeline
from memfit.report.limit import Limit

STAGES = [f"stage{i}" for i in range(1, 6)]


def moments(heights, phases=None):
    phases = phases or ["forward"] * len(heights)
    return [
        Moment(label=str(index), phase=phase, module="", by_kind={Kind.ACTIVATION: height})
        for index, (height, phase) in enumerate(zip(heights, phases, strict=True))
    ]


def test_few_moments_are_all_drawn():
    assert timeline.kept_positions(moments([1, 2, 3]), 2, most_points=3) == [0, 1, 2]


def test_many_moments_are_thinned_out_and_keep_the_peak_and_the_passes():
    heights = [(7919 * i) % 1000 for i in range(10_000)]
    heights[4321] = 5000
    phases = ["forward"] * 3333 + ["backward"] * 6666 + ["optimizer"]
    kept = timeline.kept_positions(moments(heights, phases), 4321, most_points=800)
    assert len(kept) <= 804
    assert {4321, 0, 3333, 9999} <= set(kept)
    assert kept == sorted(set(kept))


def test_the_peak_is_kept_though_others_are_as_high():
    assert 777 in timeline.kept_positions(moments([5] * 2000), 777, most_points=100)


def test_a_valley_between_two_drawn_points_is_kept():
    heights = [100] * 1000
    heights[537] = 1
    assert 537 in timeline.kept_positions(moments(heights), 0, most_points=100)


def test_the_peak_is_marked_where_it_is():
    estimate = make_estimate([f"layers.{i}" for i in range(3000)])
    drawing = timeline.draw(estimate)
    assert len(drawing.points) < drawing.moment_count == 6001
    assert drawing.points[drawing.peak_index].moment == estimate.timeline.peak


def test_regions_cover_the_width_and_none_is_too_narrow_to_see():
    regions = timeline.draw(make_estimate([f"layers.{i}" for i in range(1000)])).regions
    assert [region.phase for region in regions] == ["forward", "backward", "optimizer"]
    assert regions[0].left == 0
    assert regions[-1].left + regions[-1].width == pytest.approx(1)
    assert min(region.width for region in regions) > 0.02


def highest(path):
    return timeline.HEIGHT - min(float(value) for value in re.findall(r"V([\d.]+)", path))


def test_bands_are_stacked_up_to_the_peak():
    estimate = make_estimate(STAGES)
    drawing = timeline.draw(estimate)
    tops = [highest(band.path) for band in drawing.bands]
    assert tops == sorted(tops)
    assert tops[-1] / timeline.HEIGHT == pytest.approx(drawing.peak.bottom, abs=1e-3)
    assert drawing.bands[0].kind == "parameter"
    parameter_bytes = estimate.timeline.peak.by_kind[Kind.PARAMETER]
    assert tops[0] / tops[-1] == pytest.approx(parameter_bytes / estimate.peak_bytes, abs=1e-3)


def test_a_kind_that_never_occurs_is_not_drawn():
    assert "buffer" not in [band.kind for band in timeline.draw(make_estimate(STAGES)).bands]


@pytest.mark.parametrize(("limit_share", "drawn"), [(0.5, True), (1.0, True), (2.0, True), (100.0, False)])
def test_a_limit_is_a_line_unless_it_would_press_the_curve_flat(limit_share, drawn):
    estimate = make_estimate(STAGES)
    limit = Limit.of(str(int(estimate.peak_bytes * limit_share)))
    drawing = timeline.draw(estimate, limit)
    assert (drawing.limit is not None) is drawn
    assert drawing.peak.bottom <= 1
    if drawing.limit is not None:
        assert drawing.limit.bottom <= 1
        assert drawing.limit.bottom / drawing.peak.bottom == pytest.approx(limit_share, rel=1e-2)


def test_ticks_are_few_and_inside():
    ticks = timeline.draw(make_estimate(STAGES)).ticks
    assert ticks[0].label == "0"
    assert 2 <= len(ticks) <= 7
    assert all(0 <= tick.bottom <= 1 for tick in ticks)
    assert re.fullmatch(r"[\d.]+ KiB", ticks[1].label)
