import dataclasses

from handmade_frontier import EAGER_RUN, MIB, PEER_POINTS, record

from benchmarks.frontier import _fractions_of_inductor
from benchmarks.frontier_record import INDUCTOR, CaseRecord, PeerPoint


def test_compiled_plans_are_asked_for_where_torch_compile_ends():
    others = [
        PeerPoint(peer=INDUCTOR, setting=f"budget {peak}", peak_bytes=peak * MIB, time_ratio=1.0)
        for peak in (447, 449, 1200)  # two of one hundredth, and one above eager's own
    ]
    asked = _fractions_of_inductor(record(peers=(*PEER_POINTS, *others)))
    assert asked == [0.40, 0.34]
    assert all(EAGER_RUN.budget_bytes(part) <= peak * MIB for part, peak in zip(asked, (500, 447), strict=True))


def test_one_plan_serves_ends_that_are_near_each_other():
    near = [
        PeerPoint(peer=INDUCTOR, setting=f"budget {part}", peak_bytes=EAGER_RUN.budget_bytes(part), time_ratio=1.0)
        for part in (0.605, 0.585, 0.525)
    ]
    assert _fractions_of_inductor(dataclasses.replace(record(), peers=tuple(near))) == [0.58, 0.52]


def test_without_an_eager_run_nothing_is_asked_for():
    assert _fractions_of_inductor(CaseRecord(case="none")) == []
    assert _fractions_of_inductor(dataclasses.replace(record(), peers=())) == []
