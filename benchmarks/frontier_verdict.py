"""What the figures of the frontier benchmark say: which promises are kept, which peer comes closest."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from benchmarks.frontier_record import AOT_EAGER, CHECKPOINT, CaseRecord, Measured, MemfitPoint, PeerPoint

PEAK_TOLERANCE = 1.01
PREDICTION_TOLERANCE = 0.03  # predicted against measured slowdown, in fractions of the eager time
LARGEST_DIFFERENCE = 1e-6
PLAN_SECONDS = 15.0
SMALLEST_FRACTION = 0.25
SMALLEST_PROMISED_FOR = ("ResNet-50", "MobileNetV2", "GPT-2", "BERT", "ViT-B/16")
NEVER_SLOWER_THAN = (CHECKPOINT, AOT_EAGER)

# Published slowdowns in % at fractions of plain PyTorch's memory: MONeT, ICLR 2021. On a GPU, of the whole
# memory, not of the activation part: a mark to aim at, not a measurement beside ours.
MONET = {
    "ResNet-50": {0.66: 3.22, 0.60: 4.68, 0.53: 5.56, 0.46: 7.28, 0.40: 9.31, 0.33: 11.95},
    "GoogLeNet": {0.67: 7.13, 0.60: 7.87, 0.54: 8.44, 0.47: 9.71, 0.40: 12.14, 0.33: 15.77},
    "UNet": {0.70: -4.10, 0.63: -2.07, 0.56: -0.09, 0.49: 1.39, 0.42: 4.95, 0.35: 11.51},
    "MobileNetV2": {0.69: 2.40, 0.62: 3.10, 0.55: 4.77, 0.48: 5.53, 0.42: 7.55, 0.35: 8.72},
    "VGG-16": {0.69: -5.30, 0.61: -4.64, 0.56: -2.18, 0.48: 1.99, 0.42: 5.44, 0.39: 9.11},
}
MONET_REACH = 0.02  # how far a published fraction may be from ours


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One promise at one point."""

    promise: str
    where: str  # "ResNet-50 x16 at 0.53"
    is_kept: bool
    found: str


def allowed_slowdown(fraction: float | None, lower_bound: float) -> float | None:
    """The predicted slowdown that is promised at a fraction of the activation part, if one is.

    >>> round(allowed_slowdown(0.53, 0.04), 3), round(allowed_slowdown(0.40, 0.04), 3), allowed_slowdown(0.46, 0.04)
    (0.06, 0.07, None)
    """
    if fraction is None or 0.40 < fraction < 0.53 or fraction < 0.33:
        return None
    share = 0.25 if fraction >= 0.53 else 0.5  # of a bound below zero (planned steps can be faster), nothing
    return lower_bound + share * max(0.0, lower_bound) + 0.01


def monet(case: str, fraction: float | None) -> tuple[float, float] | None:
    """The published fraction nearest to ours and its slowdown in %, if there is one near enough."""
    published = MONET.get(model_name(case), {})
    if fraction is None or not published:
        return None
    nearest = min(published, key=lambda each: abs(each - fraction))
    return (nearest, published[nearest]) if abs(nearest - fraction) <= MONET_REACH + 1e-9 else None


def model_name(case: str) -> str:
    """`ResNet-50 x16` without its batch size."""
    return case.rpartition(" x")[0] or case


def best_peer(peers: Iterable[PeerPoint], peak_bytes: int, names: Iterable[str]) -> PeerPoint | None:
    """The fastest of the named peers that needs no more memory than this."""
    allowed = set(names)
    fitting = [
        peer
        for peer in peers
        if peer.peer in allowed
        and peer.time_ratio is not None
        and peer.peak_bytes is not None
        and peer.peak_bytes <= peak_bytes
    ]
    return min(fitting, key=lambda peer: peer.time_ratio or 0.0, default=None)


def pareto(peers: Iterable[PeerPoint]) -> list[PeerPoint]:
    """The points that no other of them beats in both memory and time, smallest peak first."""
    measured = [peer for peer in peers if peer.peak_bytes is not None and peer.time_ratio is not None]
    front: list[PeerPoint] = []
    for peer in sorted(measured, key=lambda each: (each.peak_bytes, each.time_ratio)):
        if not front or (peer.time_ratio or 0.0) < (front[-1].time_ratio or 0.0):
            front.append(peer)
    return front


def checks(record: CaseRecord) -> list[Check]:
    """All promises at all points of a case."""
    found = [check for point in record.memfit for check in _point_checks(record, point)]
    return [*found, *_monotone_checks(record)]


def _point_checks(record: CaseRecord, point: MemfitPoint) -> Iterator[Check]:
    where = f"{record.case} at {point.label}"
    measured = point.measured
    if measured is None:
        if not point.is_infeasible:
            yield Check(promise="every budget has a plan or a floor", where=where, is_kept=False, found=point.reason)
        return
    for promise, is_kept, found in (
        *_memory_promises(record, point, measured),
        *_time_promises(record, point, measured),
        _equality_promise(measured),
    ):
        yield Check(promise=promise, where=where, is_kept=is_kept, found=found)


_Promise = tuple[str, bool, str]  # its name, whether it is kept, what was found


def _memory_promises(record: CaseRecord, point: MemfitPoint, measured: Measured) -> Iterator[_Promise]:
    ratio = measured.measured_bytes / measured.budget_bytes
    yield "measured peak within the budget (1%)", ratio <= PEAK_TOLERANCE, f"{ratio:.3f} of the budget"
    if point.fraction is None and record.eager is not None and model_name(record.case) in SMALLEST_PROMISED_FOR:
        part = record.eager.fraction(measured.measured_bytes)
        yield (
            f"smallest budget: at most {SMALLEST_FRACTION} of the activation part",
            part <= SMALLEST_FRACTION,
            f"{part:.3f}",
        )


def _time_promises(record: CaseRecord, point: MemfitPoint, measured: Measured) -> Iterator[_Promise]:
    allowed = allowed_slowdown(point.fraction, measured.lower_bound)
    if allowed is not None:
        yield (
            "predicted slowdown near the lower bound",
            measured.predicted_slowdown <= allowed,
            f"{measured.predicted_slowdown:.1%}, allowed {allowed:.1%}",
        )
    off = measured.measured_slowdown - measured.predicted_slowdown
    yield "measured slowdown within 3 points of predicted", abs(off) <= PREDICTION_TOLERANCE, f"{off * 100:+.1f} points"
    peer = best_peer(record.peers, measured.measured_bytes, NEVER_SLOWER_THAN)
    if peer is not None and peer.time_ratio is not None:
        ahead = peer.time_ratio - 1 - measured.measured_slowdown
        yield (
            "never slower than checkpoint or aot_eager at the same peak",
            ahead >= 0,
            f"{ahead * 100:+.1f} points ahead of {peer.peer} {peer.setting}",
        )
    yield f"planned within {PLAN_SECONDS:.0f} s", measured.plan_s <= PLAN_SECONDS, f"{measured.plan_s:.1f} s"


def _equality_promise(measured: Measured) -> _Promise:
    return (
        "equal to eager, bit for bit or to 1e-6",
        measured.largest_difference <= LARGEST_DIFFERENCE,
        f"{', '.join(measured.differing)} differ by {measured.largest_difference:.1e}"
        if measured.differing
        else "equal",
    )


def _monotone_checks(record: CaseRecord) -> Iterator[Check]:
    measured = [(point.label, point.measured) for point in record.memfit if point.measured is not None]
    measured.sort(key=lambda pair: -pair[1].budget_bytes)
    least = itertools.accumulate((each.measured_bytes for _, each in measured), min)
    for (label, each), least_bytes in zip(measured[1:], least, strict=False):
        ratio = each.measured_bytes / least_bytes
        yield Check(
            promise="a smaller budget never measures a larger peak (1%)",
            where=f"{record.case} at {label}",
            is_kept=ratio <= PEAK_TOLERANCE,
            found=f"{ratio:.3f} of what a larger budget needed",
        )
