"""What a diagnosis says, as rows and sentences; how they look is decided elsewhere."""

import dataclasses
from collections.abc import Iterator, Sequence

from memfit.doctor.diagnosis import Diagnosis, OwnerRow, Refusal
from memfit.plan.allocator.requests import AllocatorRun, best_run
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.report.breakdown import printable
from memfit.units import format_bytes

_NOTICEABLE_SHARE = 0.01  # of what is reserved: a setting that saves less is not advised
_FRAGMENTED_SHARE = 0.05  # of what is reserved at the peak


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LineRow:
    """What one line of code holds."""

    line: str
    operators: str
    size_bytes: int
    share: float
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """The same requests under one setting."""

    label: str
    reserved_bytes: int
    allocated_bytes: int
    saved_bytes: int  # against the recording's own setting
    is_own: bool
    is_best: bool
    fits: bool | None  # what the device had; None: memory did not run out


def setting_words(settings: AllocatorSettings) -> str:
    """Write settings for people."""
    return str(settings) or "the defaults"


def subtitle(diagnosis: Diagnosis) -> str:
    """Say where the figures come from."""
    history = diagnosis.history
    words = setting_words(history.settings)
    return f"GPU {history.device}, {len(history.events):,} events, allocator settings: {words}"


def owner_rows(diagnosis: Diagnosis, top: int) -> list[LineRow]:
    """List who holds the peak, biggest first."""
    return _line_rows(diagnosis.owners, diagnosis.peak_bytes, top)


def never_freed_rows(diagnosis: Diagnosis, top: int) -> list[LineRow]:
    """List who asked for memory in the recording that was there at its end."""
    total_bytes = sum(row.size_bytes for row in diagnosis.never_freed)
    return _line_rows(diagnosis.never_freed, total_bytes, top)


def _line_rows(owners: Sequence[OwnerRow], total_bytes: int, top: int) -> list[LineRow]:
    return [
        LineRow(
            line=printable(row.line),
            operators=printable(row.operators),
            size_bytes=row.size_bytes,
            share=row.size_bytes / max(1, total_bytes),
            count=row.count,
        )
        for row in owners[:top]
    ]


def setting_rows(diagnosis: Diagnosis) -> list[SettingRow]:
    """Compare allocator settings, as they were tried."""
    own, best = diagnosis.runs[0], best_run(diagnosis.runs)
    capacity_bytes = diagnosis.refusals[-1].capacity_bytes if diagnosis.refusals else None
    return [
        SettingRow(
            label=setting_words(run.settings),
            reserved_bytes=run.peak_reserved_bytes,
            allocated_bytes=run.peak_allocated_bytes,
            saved_bytes=own.peak_reserved_bytes - run.peak_reserved_bytes,
            is_own=run is own,
            is_best=run is best,
            fits=None if capacity_bytes is None else run.peak_reserved_bytes <= capacity_bytes,
        )
        for run in diagnosis.runs
    ]


def findings(diagnosis: Diagnosis) -> list[str]:
    """Say what matters, most important first."""
    return list(_findings(diagnosis))


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    for refusal in diagnosis.refusals[-1:]:
        yield refusal_words(refusal)
    reserved_bytes = diagnosis.reserved_at_peak_bytes
    idle_share = diagnosis.idle_at_peak_bytes / max(1, reserved_bytes)
    yield (
        f"At the peak {format_bytes(diagnosis.peak_bytes)} are allocated and {format_bytes(reserved_bytes)} reserved: "
        f"{format_bytes(diagnosis.idle_at_peak_bytes)} ({idle_share:.1%}) of that nobody uses"
        + (", it is fragmented." if idle_share > _FRAGMENTED_SHARE else ".")
    )
    own = [row for row in diagnosis.owners if row.first_position >= 0]
    if own:
        size = format_bytes(own[0].size_bytes)
        yield f"Most of what the recording shows is held by {printable(own[0].line)}: {size}."
    yield _setting_advice(diagnosis.runs)
    yield from diagnosis.advice
    if diagnosis.before_bytes:
        yield (
            f"{format_bytes(diagnosis.before_bytes)} of the peak are older than the recording, so nobody is named for "
            "them; begin to record before the model is made."
        )


def refusal_words(refusal: Refusal) -> str:
    """Say what happened when memory ran out."""
    return (
        f"Memory ran out at event {refusal.position:,}: {printable(refusal.line)} asked for "
        f"{format_bytes(refusal.requested_bytes)}, {format_bytes(refusal.device_free_bytes)} were free on the device, "
        f"{format_bytes(refusal.reserved_bytes)} reserved and {format_bytes(refusal.allocated_bytes)} allocated."
    )


def _setting_advice(runs: tuple[AllocatorRun, ...]) -> str:
    own, best = runs[0], best_run(runs)
    saved_bytes = own.peak_reserved_bytes - best.peak_reserved_bytes
    if saved_bytes <= _NOTICEABLE_SHARE * own.peak_reserved_bytes:
        return "No other setting of the allocator reserves noticeably less."
    setting = str(best.settings)
    words = f"PYTORCH_CUDA_ALLOC_CONF={setting}" if setting else "The allocator with its defaults"
    return (
        f"{words} reserves {format_bytes(saved_bytes)} less ({format_bytes(best.peak_reserved_bytes)}), by simulation."
    )


def notes(diagnosis: Diagnosis) -> list[str]:
    """Say how far the figures can be trusted."""
    return [*diagnosis.history.notes, *_notes(diagnosis)]


def _notes(diagnosis: Diagnosis) -> Iterator[str]:
    replay = diagnosis.replay
    if not diagnosis.history.events:
        yield "No events were recorded: only the state at the end is shown."
    elif replay.is_equal:
        yield (
            f"All {replay.simulated:,} events were simulated: every address, every segment and both totals at the end "
            "are as recorded."
        )
    else:
        first = replay.differences[0]
        yield (
            f"The simulation goes another way than the recording from event {first.position:,} on ({first.what}): "
            "blocks are counted as requested and rounded, and figures of other settings are less certain."
        )
    if any(segment.is_private for segment in diagnosis.history.segments):
        yield "Private pools (CUDA graphs, MemPool) are counted, and simulated as if they were shared."
    if diagnosis.before_bytes:
        yield (
            "Other settings are simulated from an empty allocator on: what is older than the recording is allocated "
            "first, in the order of its addresses. Compare these rows with each other."
        )
