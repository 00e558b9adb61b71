"""A diagnosis as one HTML file that needs nothing else.

Names of files, functions and operators are untrusted text: the template escapes all of them, the script gets them as
JSON that cannot end its element, and the page's own policy lets no other script run and nothing be loaded.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from memfit.doctor.diagnosis import Diagnosis
from memfit.plan.allocator.requests import best_run
from memfit.report import doctor_rows
from memfit.report.breakdown import printable
from memfit.report.doctor_chart import Timeline, draw
from memfit.report.plan_page import page_file, page_template, palette_css
from memfit.report.timeline import HEIGHT, WIDTH
from memfit.units import format_bytes

_MOST_LINES = 60


def render(diagnosis: Diagnosis) -> str:
    """Write the page of a diagnosis."""
    timeline, fragmentation = draw(diagnosis)
    return page_template("doctor_page.html").render(
        version=importlib.metadata.version("memfit"),
        script=Markup(page_file("doctor_page.js")),
        style=Markup(page_file("plan_page.css") + page_file("doctor_page.css")),
        palette=Markup(palette_css()),
        name=printable(diagnosis.history.name),
        subtitle=printable(doctor_rows.subtitle(diagnosis)),
        findings=doctor_rows.findings(diagnosis),
        cards=list(_cards(diagnosis)),
        timeline=timeline,
        width=WIDTH,
        height=HEIGHT,
        data=_data(diagnosis, timeline),
        peak_bytes=diagnosis.peak_bytes,
        owners=doctor_rows.owner_rows(diagnosis, _MOST_LINES),
        more_owners=max(0, len(diagnosis.owners) - _MOST_LINES),
        never_freed=doctor_rows.never_freed_rows(diagnosis, _MOST_LINES),
        map=fragmentation,
        segments=diagnosis.segments,
        idle_bytes=diagnosis.idle_at_peak_bytes,
        settings=doctor_rows.setting_rows(diagnosis),
        notes=doctor_rows.notes(diagnosis),
    )


def _cards(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str]]:
    """Yield the figures on top: title, figure, and a line below it."""
    yield "Peak allocated", format_bytes(diagnosis.peak_bytes), f"{diagnosis.peak_bytes:,} bytes"
    yield "Peak reserved", format_bytes(diagnosis.peak_reserved_bytes), f"{diagnosis.peak_reserved_bytes:,} bytes"
    share = diagnosis.idle_at_peak_bytes / max(1, diagnosis.reserved_at_peak_bytes)
    yield "Not in use at the peak", format_bytes(diagnosis.idle_at_peak_bytes), f"{share:.1%} of what is reserved then"
    never_bytes = sum(row.size_bytes for row in diagnosis.never_freed)
    yield "Never freed", format_bytes(never_bytes), "asked for in the recording, there at its end"
    best = best_run(diagnosis.runs)
    yield "Least reserved", format_bytes(best.peak_reserved_bytes), f"with {doctor_rows.setting_words(best.settings)}"
    equal = diagnosis.replay.is_equal
    yield "Simulation", "exact" if equal else "differs", "every address as recorded" if equal else "see the notes"


def _data(diagnosis: Diagnosis, timeline: Timeline) -> Mapping[str, Any]:
    """Collect what the page needs to answer a pointer or a key."""
    return {
        "count": len(diagnosis.history.events),
        "peak": timeline.peak_index,
        "points": [
            [each.position, round(each.left, 5), each.reserved_bytes, each.words, list(each.sizes)]
            for each in timeline.points
        ],
    }
