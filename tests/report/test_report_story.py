import dataclasses

import pytest
from handmade_story import STAGES, plan_of_chain, without_step

from memfit.errors import InvalidFile
from memfit.ir import Kind
from memfit.plan.simulate import simulate
from memfit.report.shades import DARK, LIGHT, SHADES, Shade, shade_of, slug
from memfit.report.story import common_places, stories_of


@pytest.fixture(scope="module")
def plan():
    return plan_of_chain(STAGES)


@pytest.fixture(scope="module")
def story(plan):
    [story] = stories_of(plan)
    return story


def test_both_tracks_are_what_the_simulator_says_moment_by_moment(plan, story):
    step = plan.step
    for track, graph, program in (
        (story.planned, step.graph, plan.program),
        (story.unplanned, step.eager, step.unplanned_program()),
    ):
        timeline = simulate(graph, program, workspace_bytes=step.workspace_bytes, optimizer=step.optimizer)
        assert track.totals(story.values) == [moment.live_bytes for moment in timeline.moments]
        assert [moment.label for moment in track.moments] == [moment.label for moment in timeline.moments]


def test_the_peaks_are_those_of_the_plan(plan, story):
    assert max(story.planned.totals(story.values)) == plan.peak_bytes
    assert max(story.unplanned.totals(story.values)) == plan.unplanned_peak_bytes


def test_what_is_computed_again_is_a_band_of_its_own(story):
    planned, unplanned = (track.stacked(story.values) for track in (story.planned, story.unplanned))
    assert max(planned[Shade.AGAIN]) > 0
    assert max(unplanned[Shade.AGAIN]) == 0
    assert max(planned[Shade.ACTIVATION]) < max(unplanned[Shade.ACTIVATION])


def test_an_operation_of_both_steps_has_one_place(story):
    planned = {
        m.label: place for m, place in zip(story.planned.moments, story.planned.places, strict=True) if not m.is_again
    }
    unplanned = {m.label: place for m, place in zip(story.unplanned.moments, story.unplanned.places, strict=True)}
    assert planned == unplanned
    again = {place for m, place in zip(story.planned.moments, story.planned.places, strict=True) if m.is_again}
    assert len(again) == 2
    assert not again & set(unplanned.values())
    assert story.place_count == len(unplanned) + len(again)


def test_operations_in_another_order_keep_the_longest_common_row(story):
    moments = story.unplanned.moments
    moved = (moments[-1], *moments[:-1])
    ours, theirs, count = common_places(moved, moments)
    assert ours == sorted(ours)
    assert theirs == sorted(theirs)
    assert ours[1:] == theirs[:-1]
    assert count == len(moments) + 1


def test_times_add_up_to_those_of_the_plan(plan, story):
    assert sum(moment.time_us for moment in story.unplanned.moments) == pytest.approx(plan.step_us)
    assert sum(moment.time_us for moment in story.planned.moments) == pytest.approx(plan.step_us + plan.extra_us)


def test_an_old_plan_has_no_story(plan):
    assert stories_of(without_step(plan)) == []


def test_a_plan_in_regions_has_one_for_each(plan):
    whole = dataclasses.replace(plan, step=None, regions={"one": plan, "two": plan})
    assert [story.name for story in stories_of(whole)] == ["one", "two"]


@pytest.mark.parametrize("name", ["peak_bytes", "unplanned_peak_bytes"])
def test_a_peak_that_the_step_does_not_come_to_is_refused(plan, name):
    with pytest.raises(InvalidFile, match="peak is 1 B, and its own step comes to"):
        stories_of(dataclasses.replace(plan, **{name: 1}))


def test_a_program_of_another_graph_is_refused_by_digest(plan):
    other = plan_of_chain(STAGES[:4], dropped=(1,))
    with pytest.raises(InvalidFile, match=f"graph of digest {other.program.graph_digest}"):
        stories_of(dataclasses.replace(plan, program=other.program))


def test_every_shade_has_a_colour_and_every_kind_a_shade():
    assert all(slug(shade) in LIGHT and slug(shade) in DARK for shade in SHADES)
    assert LIGHT.keys() == DARK.keys()
    assert all(shade_of(kind, is_again=again) in SHADES for kind in Kind for again in (True, False))
