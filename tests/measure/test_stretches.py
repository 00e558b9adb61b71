import torch

from memfit._memory_events import set_mark
from memfit.measure.stretches import measure_stretches

KIB = 1024


def test_bytes_are_told_from_mark_to_mark():
    held = torch.zeros(KIB)

    def run():
        kept = torch.zeros(2 * KIB)
        set_mark("between")
        torch.zeros(8 * KIB)
        kept = torch.zeros(KIB)
        set_mark("after")
        del kept

    stretches = measure_stretches(run, resident=[held])
    assert [each.label for each in stretches] == ["", "between", "after"]
    assert [each.start_bytes for each in stretches] == [4 * KIB, 12 * KIB, 8 * KIB]
    assert [each.peak_bytes for each in stretches] == [12 * KIB, 44 * KIB, 8 * KIB]
    assert [each.end_bytes for each in stretches] == [12 * KIB, 8 * KIB, 4 * KIB]


def test_what_was_there_before_is_seen_to_be_released():
    held = [torch.zeros(KIB)]

    def run():
        set_mark("released")
        held.clear()
        set_mark("allocated")
        held.append(torch.zeros(KIB))

    stretches = measure_stretches(run, resident=held)
    assert [each.end_bytes for each in stretches] == [4 * KIB, 0, 4 * KIB]
    assert max(each.peak_bytes for each in stretches) == 4 * KIB


def test_a_run_without_marks_is_one_stretch():
    (stretch,) = measure_stretches(lambda: torch.zeros(KIB), resident=[])
    assert (stretch.start_bytes, stretch.peak_bytes, stretch.end_bytes) == (0, 4 * KIB, 0)
