"""Records of real GPUs: every address, every segment and the peaks come out of the simulation again."""

import dataclasses
import time

import pytest
from gpu_truth import TRACES, needs_records, trace_named
from recorded import shifted

from memfit.doctor.diagnosis import diagnose
from memfit.doctor.read import read_file, read_histories
from memfit.plan.allocator.history import Action
from memfit.plan.allocator.replay import replay
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.report import doctor_page

pytestmark = needs_records

# Allocated and reserved, as the collection of records states them.
PEAKS = {
    "Wedsonlin__medium_128_training": (7_026_606_592, 7_235_174_400),
    "Wedsonlin__medium_256_training": (9_113_374_720, 9_265_217_536),
    "bcrafton__memory_snapshot": (3_861_684_736, 4_238_344_192),
    "kkaitlyn111__memory_ctx128_fullstep": (55_079_000_576, 61_111_009_280),
    "kkaitlyn111__memory_ctx128_forward_": (19_498_420_224, 19_667_091_456),
    "kkaitlyn111__memory_ctx256_forward_": (26_388_097_024, 26_545_750_016),
    "kkaitlyn111__memory_ctx128_forward_mixed": (24_024_505_344, 24_245_174_272),
    "kkaitlyn111__memory_ctx256_forward_mixed": (28_398_369_792, 28_848_422_912),
    "shreyansh26__profile_grad": (4_436_169_216, 4_439_670_784),
    "shreyansh26__profile_no_grad": (4_236_169_216, 4_439_670_784),
}


def read(path):
    (history,) = read_histories(read_file(path), path.name)
    return history


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_record_is_replayed_to_the_last_address(path):
    history = read(path)
    result = replay(history)
    assert result.is_equal, result.differences[:3]
    assert result.simulated == len(history.events)
    if history.name in PEAKS:
        assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == PEAKS[history.name]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_record_has_a_page_of_a_moderate_size_soon(path):
    began = time.process_time()
    diagnosis = diagnose(read(path))
    assert diagnosis.peak_bytes == diagnosis.replay.peak_allocated_bytes
    assert diagnosis.peak_reserved_bytes == diagnosis.replay.peak_reserved_bytes
    assert sum(row.size_bytes for row in diagnosis.owners) == diagnosis.peak_bytes
    assert 20_000 < len(doctor_page.render(diagnosis).encode()) < 2_000_000
    assert time.process_time() - began < 10


def test_the_comparison_would_see_another_allocator():
    history = read(trace_named("kkaitlyn111__memory_ctx128_fullstep"))
    for settings in ("max_split_size_mb:64", "roundup_power2_divisions:4", "expandable_segments:True"):
        assert not replay(dataclasses.replace(history, settings=AllocatorSettings.parse(settings))).is_equal
    allocs = [index for index, event in enumerate(history.events) if event.action is Action.ALLOC]
    assert not replay(shifted(history, allocs[len(allocs) // 2], 512)).is_equal


def test_released_segments_are_predicted_in_their_order():
    history = read(trace_named("kkaitlyn111__memory_ctx256_fullstep_"))
    frees = [index for index, event in enumerate(history.events) if event.action is Action.SEGMENT_FREE]
    assert len(frees) > 700
    events = list(history.events)
    events[frees[0]], events[frees[1]] = events[frees[1]], events[frees[0]]
    assert not replay(dataclasses.replace(history, events=tuple(events))).is_equal
