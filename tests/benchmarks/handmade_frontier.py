"""A case of the frontier with round numbers: 100 MiB persist, 1000 are the activation part."""

from typing import Any

from benchmarks.frontier_record import (
    AOT_EAGER,
    CHECKPOINT,
    INDUCTOR,
    CaseRecord,
    EagerRun,
    Measured,
    MemfitPoint,
    PeerPoint,
)

MIB = 2**20
EAGER_RUN = EagerRun(peak_bytes=1100 * MIB, persistent_bytes=100 * MIB, step_s=0.5)

PEER_POINTS = (
    PeerPoint(peer=CHECKPOINT, setting="17 segments of 1 block", peak_bytes=400 * MIB, time_ratio=1.30),
    PeerPoint(peer=CHECKPOINT, setting="5 segments of 4 blocks", peak_bytes=600 * MIB, time_ratio=1.25),
    PeerPoint(peer=AOT_EAGER, setting="budget 0.5", peak_bytes=700 * MIB, time_ratio=1.10),
    PeerPoint(peer=AOT_EAGER, setting="budget 0.1", peak_bytes=750 * MIB, time_ratio=1.20),
    PeerPoint(peer=INDUCTOR, setting="budget 0.5", peak_bytes=500 * MIB, time_ratio=0.90),
    PeerPoint(peer=INDUCTOR, setting="budget 0.1", reason="not done after 300 s"),
)


def point(fraction: float | None, **changes: Any) -> MemfitPoint:
    """A point that keeps every promise, but for the changes."""
    budget_bytes = 300 * MIB if fraction is None else EAGER_RUN.budget_bytes(fraction)
    fields = {
        "budget_bytes": budget_bytes,
        "predicted_bytes": budget_bytes,
        "measured_bytes": budget_bytes,
        "predicted_slowdown": 0.05,
        "measured_slowdown": 0.06,
        "lower_bound": 0.04,
        "gap": 0.01,
        "plan_s": 3.0,
        "differing": [],
        "largest_difference": 0.0,
    }
    return MemfitPoint(fraction=fraction, measured=Measured(**fields | changes))


def record(*points: MemfitPoint, case: str = "ResNet-50 x16", peers: tuple[PeerPoint, ...] = PEER_POINTS) -> CaseRecord:
    return CaseRecord(case=case, eager=EAGER_RUN, memfit=points, peers=peers)
