"""The table of the race from points as they are kept."""

from benchmarks.frontier_record import COMPILED, INDUCTOR, CaseRecord, EagerRun, PeerPoint
from benchmarks.race_markdown import race_markdown


def test_a_row_says_ratios_parts_and_first_steps() -> None:
    points = [
        PeerPoint(
            peer=COMPILED, setting="0.66 of the part", peak_bytes=166, time_ratio=0.914, error=0.02, first_step_s=80.4
        ),
        PeerPoint(
            peer=COMPILED, setting="0.50 of the part", peak_bytes=150, time_ratio=0.95, error=0.01, first_step_s=9.0
        ),
        PeerPoint(peer=COMPILED, setting="0.33 of the part", reason="InfeasibleBudget: no plan"),
        PeerPoint(peer=COMPILED, setting="smallest", peak_bytes=125, time_ratio=1.2, error=0.03, first_step_s=9.0),
        PeerPoint(peer=INDUCTOR, setting="budget 1.0", peak_bytes=202, time_ratio=0.877, error=0.01, first_step_s=58.0),
        PeerPoint(peer=INDUCTOR, setting="budget 0.5", reason="RuntimeError: no"),
    ]
    eager = EagerRun(peak_bytes=200, persistent_bytes=100, step_s=1.0)
    table = race_markdown([CaseRecord(case="Net x2", eager=eager, peers=points)])
    assert table.splitlines()[-1] == (
        "| Net x2 |  | 0.95 ± 0.01 | no plan | 0.25: 1.20 ± 0.03 | 1.02: 0.88; none: failed | 0.66: 0.91 | 80, 58 |"
    )
    assert len({line.count("|") for line in table.splitlines()}) == 1
