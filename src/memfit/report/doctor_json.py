"""A diagnosis, or an explained message, for machines: versioned JSON."""

import dataclasses
from typing import Any

from memfit.doctor.diagnosis import Diagnosis
from memfit.doctor.oom_text import OutOfMemoryMessage, advice_of
from memfit.report import doctor_rows

_FORMAT = "memfit.doctor"
_VERSION = 1


def diagnosis_data(diagnosis: Diagnosis, *, top: int = 10) -> dict[str, Any]:
    """Collect the findings of a history; `top` lines of each table."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "name": diagnosis.history.name,
        "device": diagnosis.history.device,
        "settings": str(diagnosis.history.settings),
        "events": len(diagnosis.history.events),
        "replayed_exactly": diagnosis.replay.is_equal,
        "differences": [dataclasses.asdict(each) for each in diagnosis.replay.differences[:10]],
        "peak_allocated_bytes": diagnosis.peak_bytes,
        "peak_reserved_bytes": diagnosis.peak_reserved_bytes,
        "peak_position": diagnosis.peak_position,
        "reserved_at_peak_bytes": diagnosis.reserved_at_peak_bytes,
        "not_in_use_at_peak_bytes": diagnosis.idle_at_peak_bytes,
        "before_recording_bytes": diagnosis.before_bytes,
        "by_line": [dataclasses.asdict(each) for each in doctor_rows.owner_rows(diagnosis, top)],
        "never_freed": [dataclasses.asdict(each) for each in doctor_rows.never_freed_rows(diagnosis, top)],
        "by_setting": [dataclasses.asdict(each) for each in doctor_rows.setting_rows(diagnosis)],
        "out_of_memory": [dataclasses.asdict(each) for each in diagnosis.refusals],
        "findings": doctor_rows.findings(diagnosis),
        "notes": doctor_rows.notes(diagnosis),
    }


def message_data(message: OutOfMemoryMessage) -> dict[str, Any]:
    """Collect the numbers of a message, and what they mean."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        **dataclasses.asdict(message),
        "outside_bytes": message.outside_bytes,
        "advice": advice_of(message),
    }
