"""Predicted beside measured, as rows for a page."""

import dataclasses
from collections.abc import Iterator

from memfit.prove.profile import Profile
from memfit.report.proof_tables import profile_verdict
from memfit.units import format_bytes

PREDICTED, MEASURED = "output", "parameter"  # colours


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRow:
    """One figure."""

    label: str
    predicted: str
    measured: str
    error: str
    bars: tuple[tuple[float, str], ...]  # shares of the longest bar, and their colours


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a profile found."""

    words: str
    rows: tuple[MeasuredRow, ...]


def measured_of(profile: Profile, unplanned_peak_bytes: int) -> Measured:
    """A profile beside what its plan said."""
    pairs = "one pair of steps" if profile.pairs == 1 else f"{profile.pairs} pairs of steps in turns"
    first, _, rest = profile_verdict(profile).partition(" ")
    step = f"a planned step took {1000 * profile.step_s:.1f} ms"
    return Measured(
        words=f"{first.capitalize()} {rest}. Measured over {pairs}; {step}.",
        rows=tuple(_rows(profile, unplanned_peak_bytes)),
    )


def _rows(profile: Profile, unplanned_peak_bytes: int) -> Iterator[MeasuredRow]:
    longest = max(profile.peak_bytes, profile.predicted_peak_bytes, unplanned_peak_bytes, profile.eager_peak_bytes or 0)
    yield _peak_row("planned peak", profile.predicted_peak_bytes, profile.peak_bytes, longest)
    if profile.eager_peak_bytes is not None:
        yield _peak_row("unplanned peak", unplanned_peak_bytes, profile.eager_peak_bytes, longest)
    if profile.slowdown is not None:
        farthest = max(abs(profile.slowdown), abs(profile.predicted_slowdown)) or 1.0
        yield MeasuredRow(
            label="extra time",
            predicted=f"{profile.predicted_slowdown:+.1%}",
            measured=f"{profile.slowdown:+.1%}",
            error=f"{100 * (profile.predicted_slowdown - profile.slowdown):+.1f} points",
            bars=(
                (abs(profile.predicted_slowdown) / farthest, PREDICTED),
                (abs(profile.slowdown) / farthest, MEASURED),
            ),
        )


def _peak_row(label: str, predicted_bytes: int, measured_bytes: int, longest: int) -> MeasuredRow:
    return MeasuredRow(
        label=label,
        predicted=format_bytes(predicted_bytes),
        measured=format_bytes(measured_bytes),
        error=f"{predicted_bytes / max(1, measured_bytes) - 1:+.2%}",
        bars=((predicted_bytes / longest, PREDICTED), (measured_bytes / longest, MEASURED)),
    )
