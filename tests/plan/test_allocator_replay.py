"""Recorded histories come out of the simulation again, and anything else is told."""

import dataclasses
import random

import pytest
from recorded import Recorder, shifted

from memfit.plan.allocator.history import Action, Event
from memfit.plan.allocator.replay import replay
from memfit.plan.allocator.requests import (
    Allocate,
    EmptyCache,
    Release,
    best_run,
    compare_settings,
    requests_of,
    run_requests,
)
from memfit.plan.allocator.settings import AllocatorSettings

MIB = 2**20
SIZES = (100, 5000, 300_000, MIB, 2 * MIB, 7 * MIB, 11 * MIB + 7, 30 * MIB)


def record(settings="", *, seed=0, count=400, capacity_bytes=None):
    """Requests of all sizes, with a cache that is emptied now and then."""
    draw = random.Random(seed)
    recorder, live = Recorder(settings, capacity_bytes), []
    for number in range(count):
        if len(live) > 12 or (live and draw.random() < 0.45):
            recorder.free(live.pop(draw.randrange(len(live))))
        elif number % 97 == 96:
            recorder.allocator.empty_cache()
        else:
            live.append(recorder.allocate(draw.choice(SIZES)))
    return recorder


@pytest.mark.parametrize(
    "settings", ["", "max_split_size_mb:25", "roundup_power2_divisions:4", "expandable_segments:True"]
)
def test_a_whole_recording_is_equal_under_its_settings(settings):
    recorder = record(settings)
    result = replay(recorder.history())
    assert result.is_equal, result.differences[:3]
    assert result.peak_reserved_bytes == recorder.allocator.peak_reserved_bytes
    assert result.peak_allocated_bytes == recorder.allocator.peak_allocated_bytes


def test_under_other_settings_it_is_not():
    history = record("max_split_size_mb:25").history()
    assert not replay(dataclasses.replace(history, settings=AllocatorSettings())).is_equal


@pytest.mark.parametrize("seed", range(3))
def test_a_late_recording_of_expandable_segments_is_equal(seed):
    recorder = record("expandable_segments:True", seed=seed)
    result = replay(recorder.history(skip=300))
    assert result.is_equal, result.differences[:3]


@pytest.mark.parametrize("seed", range(5))
def test_a_recording_that_began_late_is_equal_where_no_tail_is_hidden(seed):
    recorder = record(seed=seed)
    history = recorder.history(skip=300)
    result = replay(history)
    hidden = any(block.tail_limit_bytes for segment in result.start for block in segment.blocks)
    assert result.is_equal or hidden, result.differences[:3]


def test_a_tail_that_is_known_is_counted():
    recorder = Recorder()
    whole = recorder.allocate(21 * MIB)  # a segment of 22, not split
    recorder.free(whole)
    address = recorder.allocate(21 * MIB + 5)
    late = recorder.history(skip=len(recorder.device.events))
    (segment,) = replay(late).start
    assert segment.blocks[0].size_bytes == 22 * MIB
    recorder.free(address)
    (segment,) = replay(recorder.history(skip=len(recorder.device.events) - 2)).start
    assert segment.blocks[0].size_bytes == 22 * MIB  # told by the gap to the segment's end


def test_a_tail_that_the_start_cannot_tell_is_shown_by_what_lands_behind_it():
    recorder = Recorder()
    whole = recorder.allocate(40 * MIB)
    recorder.free(whole)
    first, second = recorder.allocate(22 * MIB), recorder.allocate(18 * MIB)
    recorder.free(first)
    first = recorder.allocate(21 * MIB + 7 * 512)  # not split: a little less than a mebibyte stays with it
    recorder.free(second)
    begin = len(recorder.device.events)
    third = recorder.allocate(18 * MIB)
    recorder.free(first)
    recorder.free(third)
    result = replay(recorder.history(skip=begin))
    assert result.is_equal, result.differences
    assert result.start_allocated_bytes == 22 * MIB


def test_blocks_that_wait_for_another_stream_are_replayed_as_such():
    recorder = Recorder()
    waiting = recorder.allocate(4 * MIB)
    recorder.allocator.record_stream(waiting, 7)
    recorder.allocator.free(waiting)
    recorder.device.events.append(Event(Action.FREE_REQUESTED, waiting, 4 * MIB, 0, 0))
    other = recorder.allocate(4 * MIB)
    assert other != waiting
    recorder.allocator.complete_free(waiting)
    recorder.device.events.append(Event(Action.FREE_COMPLETED, waiting, 4 * MIB, 0, 0))
    assert recorder.allocate(4 * MIB) == waiting
    for skip in range(len(recorder.device.events)):
        assert replay(recorder.history(skip=skip)).is_equal


def test_a_changed_address_is_told_with_its_position():
    history = record().history()
    position = next(index for index, event in enumerate(history.events) if event.action is Action.ALLOC and index > 50)
    differences = replay(shifted(history, position, 512)).differences
    assert differences[0].position == position
    assert differences[0].what == "address"


def test_a_missing_segment_and_one_too_many_are_told():
    history = record().history()
    at = next(index for index, event in enumerate(history.events) if event.action is Action.SEGMENT_ALLOC)
    fewer = dataclasses.replace(history, events=(*history.events[:at], *history.events[at + 1 :]), segments=())
    assert any("record does not have" in each.what for each in replay(fewer).differences)
    twice = dataclasses.replace(history, events=(*history.events[: at + 1], *history.events[at:]))
    assert any("does not need" in each.what for each in replay(twice).differences)


def test_segments_that_are_kept_where_the_cache_is_emptied_are_told():
    history = record().history()
    at = next(index for index, event in enumerate(history.events) if event.action is Action.SEGMENT_FREE)
    fewer = dataclasses.replace(history, events=(*history.events[:at], *history.events[at + 1 :]))
    assert not replay(fewer).is_equal


def test_requests_give_the_same_peaks_as_the_run_they_come_from():
    recorder = record()
    run = run_requests(requests_of(recorder.history()))
    assert run.peak_allocated_bytes == recorder.allocator.peak_allocated_bytes
    assert run.peak_reserved_bytes == recorder.allocator.peak_reserved_bytes


def test_requests_stop_where_the_capacity_ends():
    run = run_requests([Allocate(0, 30 * MIB), Allocate(1, 30 * MIB), Release(0)], capacity_bytes=40 * MIB)
    assert run.out_of_memory_at == 1
    assert run.peak_reserved_bytes == 30 * MIB


def test_empty_requests_take_nothing():
    run = run_requests([Allocate(0, 0), Release(0), EmptyCache()])
    assert (run.peak_allocated_bytes, run.peak_reserved_bytes) == (0, 0)


def test_the_best_setting_reserves_least_and_the_simplest_of_equals_wins():
    growing = [each for size in range(20, 60, 2) for each in (Allocate(size, size * MIB), Release(size))]
    runs = compare_settings(growing)
    assert best_run(runs).settings == AllocatorSettings(expandable_segments=True)
    assert runs[0].fragmentation_bytes > 10 * runs[1].fragmentation_bytes
    same = compare_settings([Allocate(0, 40 * MIB)])
    assert best_run(same).settings == AllocatorSettings()


def test_a_hundred_thousand_events_take_a_moment():
    recorder = record(count=70_000)
    history = recorder.history()
    assert len(history.events) > 100_000
    assert replay(history).is_equal
