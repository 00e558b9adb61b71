"""The findings of a history that is known to the byte."""

import dataclasses

import pytest
from recorded_training import MIB, record, refused, training

from memfit.doctor.diagnosis import diagnose
from memfit.doctor.ledger import BEFORE_FIRST
from memfit.doctor.stacks import BEFORE, NO_STACK, owner_of
from memfit.plan.allocator.requests import USUAL_SETTINGS
from memfit.plan.allocator.settings import AllocatorSettings


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:64"])
@pytest.mark.parametrize("skip", [0, 40])
def test_peaks_are_those_of_the_allocator(settings, skip):
    recorder = record(settings)
    diagnosis = diagnose(training(settings, skip=skip))
    assert diagnosis.replay.is_equal
    assert diagnosis.peak_bytes == recorder.allocator.peak_allocated_bytes
    assert diagnosis.peak_reserved_bytes == recorder.allocator.peak_reserved_bytes


def test_the_peak_is_divided_among_the_lines_that_hold_it():
    diagnosis = diagnose(training())
    assert sum(row.size_bytes for row in diagnosis.owners) == diagnosis.peak_bytes
    by_line = {row.line: row for row in diagnosis.owners}
    assert by_line["app/train.py:3 in make_model"].size_bytes == 48 * MIB
    assert by_line["app/train.py:3 in make_model"].count == 4
    assert by_line["model/block.py:20 in forward"].operators == "linear"
    assert "backward of Bmm" in by_line
    assert [row.size_bytes for row in diagnosis.owners] == sorted(
        (row.size_bytes for row in diagnosis.owners), reverse=True
    )


def test_segments_at_the_peak_are_filled_by_their_parts():
    diagnosis = diagnose(training())
    for segment in diagnosis.segments:
        assert sum(part.size_bytes for part in segment.parts) == segment.size_bytes
        assert segment.largest_free_bytes <= segment.free_bytes
    held_bytes = sum(part.size_bytes for each in diagnosis.segments for part in each.parts if part.line)
    assert held_bytes == diagnosis.peak_bytes
    assert diagnosis.reserved_at_peak_bytes - diagnosis.idle_at_peak_bytes == diagnosis.peak_bytes


def test_what_is_never_freed_is_named():
    rows = {row.line: row.count for row in diagnose(training()).never_freed}
    assert rows == {"app/train.py:3 in make_model": 4, "app/train.py:12 in log": 3}


def test_what_is_older_than_the_recording_has_no_name():
    diagnosis = diagnose(training(skip=12))
    before = next(row for row in diagnosis.owners if row.line == BEFORE)
    assert before.first_position == BEFORE_FIRST
    assert diagnosis.before_bytes == before.size_bytes >= 48 * MIB


def test_a_peak_before_the_first_event_is_found():
    history = training()
    live = next(index for index in range(len(history.events)) if diagnose(training(skip=index)).peak_position == -1)
    diagnosis = diagnose(training(skip=live))
    assert diagnosis.peak_bytes == diagnosis.replay.start_allocated_bytes
    assert sum(row.size_bytes for row in diagnosis.owners) == diagnosis.peak_bytes


def test_the_first_run_is_under_the_recordings_own_settings():
    for settings in ("", "max_split_size_mb:128", "max_split_size_mb:200"):
        runs = diagnose(training(settings)).runs
        assert runs[0].settings == AllocatorSettings.parse(settings)
        assert len({run.settings for run in runs}) == len(runs) >= len(USUAL_SETTINGS)


def test_a_refusal_tells_what_was_left():
    (refusal,) = diagnose(refused()).refusals
    assert refusal.requested_bytes == 90 * MIB
    assert refusal.device_free_bytes == 8 * MIB
    assert refusal.capacity_bytes == refusal.reserved_bytes + 8 * MIB
    assert refusal.line == "model/block.py:20 in forward"


def test_a_history_without_events_shows_its_end():
    history = training()
    diagnosis = diagnose(dataclasses.replace(history, events=()))
    assert diagnosis.peak_bytes == history.allocated_at_end_bytes
    assert diagnosis.peak_reserved_bytes == history.reserved_at_end_bytes


def test_a_history_that_cannot_be_replayed_is_counted_as_requested():
    history = training("max_split_size_mb:25")
    diagnosis = diagnose(dataclasses.replace(history, settings=AllocatorSettings.parse("roundup_power2_divisions:2")))
    assert not diagnosis.replay.is_equal
    assert diagnosis.peak_bytes > 0
    assert diagnosis.peak_reserved_bytes == record("max_split_size_mb:25").allocator.peak_reserved_bytes


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ("", NO_STACK),
        ("at::native::empty", "inside empty"),
        ("torch/nn/modules/linear.py:1:forward", "torch/nn/modules/linear.py:1 in forward"),
        (
            "transformers/models/gpt2/modeling_gpt2.py:7:forward < main.py:1:run",
            "transformers/models/gpt2/modeling_gpt2.py:7 in forward",
        ),
        (
            "torch::autograd::generated::details::pow_backward < torch::autograd::generated::PowBackward0::apply",
            "backward of Pow",
        ),
    ],
)
def test_a_stack_belongs_to_its_innermost_own_line(stack, line):
    assert owner_of(stack).line == line
