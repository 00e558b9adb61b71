"""The page, the tables and the JSON of a diagnosis."""

import dataclasses
import io
import json

import pytest
from recorded import Recorder
from recorded_training import record, refused, training
from rich.console import Console

from memfit.doctor.diagnosis import diagnose
from memfit.plan.allocator.settings import AllocatorSettings
from memfit.report import doctor_page, doctor_rows
from memfit.report.doctor_chart import draw
from memfit.report.doctor_json import diagnosis_data
from memfit.report.doctor_tables import print_diagnosis
from memfit.units import format_bytes

EVIL = "</script><img src=x onerror=alert(1)>.py:3:<b>f</b>\x1b[31m"


def printed(diagnosis, width=100):
    console = Console(file=io.StringIO(), width=width)
    print_diagnosis(console, diagnosis)
    return console.file.getvalue()


def test_tables_say_peak_lines_leaks_segments_and_settings():
    diagnosis = diagnose(training())
    text = printed(diagnosis)
    assert format_bytes(diagnosis.peak_bytes) in text
    for words in ("app/train.py:3 in make_model", "app/train.py:12 in log", "Segments at the peak", "as recorded"):
        assert words in text
    assert "every address" in " ".join(text.split())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fit_any_terminal(width):
    assert max(map(len, printed(diagnose(training()), width).splitlines())) <= width


def test_a_refusal_is_said_first_and_settings_say_whether_they_fit():
    diagnosis = diagnose(refused())
    assert doctor_rows.findings(diagnosis)[0].startswith("Memory ran out at event")
    assert {row.fits for row in doctor_rows.setting_rows(diagnosis)} <= {True, False}
    assert "fits" in printed(diagnosis)
    assert "<th>fits</th>" in doctor_page.render(diagnosis)


def test_a_setting_that_saves_is_advised_and_marked():
    diagnosis = diagnose(training())
    rows = doctor_rows.setting_rows(diagnosis)
    assert sum(row.is_own for row in rows) == sum(row.is_best for row in rows) == 1
    assert rows[0].saved_bytes == 0
    assert any(
        "PYTORCH_CUDA_ALLOC_CONF=" in each or "No other setting" in each for each in doctor_rows.findings(diagnosis)
    )


def test_where_the_defaults_are_best_they_are_advised():
    recorder = Recorder("roundup_power2_divisions:2")
    recorder.allocate(17 * 2**20)  # 24 MiB of it
    sentences = doctor_rows.findings(diagnose(recorder.history(), [AllocatorSettings()]))
    assert any(each.startswith("The allocator with its defaults reserves") for each in sentences)


def test_bands_add_up_to_what_is_allocated_at_every_point():
    for skip in (0, 30):
        diagnosis = diagnose(training(skip=skip))
        timeline, _ = draw(diagnosis)
        assert timeline.points[timeline.peak_index].position == diagnosis.peak_position
        for point in timeline.points:
            assert sum(point.sizes) == diagnosis.allocated_bytes[point.position]
            assert point.reserved_bytes == diagnosis.reserved_bytes[point.position]


def test_the_map_has_every_segment_inside_of_its_width():
    diagnosis = diagnose(training())
    _, fragmentation = draw(diagnosis)
    assert len(fragmentation.segments) == len(diagnosis.segments)
    for segment in fragmentation.segments:
        assert float(segment.left) + float(segment.width) <= 1000.01


def test_a_long_history_is_drawn_with_few_points():
    recorder = record(steps=400)
    diagnosis = diagnose(recorder.history(frames=training().frames))
    timeline, _ = draw(diagnosis)
    assert len(diagnosis.allocated_bytes) > 10_000
    assert len(timeline.points) < 800
    assert len(doctor_page.render(diagnosis)) < 600_000


def test_names_stay_text_on_the_page_and_harmless_in_the_terminal():
    diagnosis = diagnose(dataclasses.replace(training(), frames=(EVIL,) * 4, name="<i>" + EVIL))
    page = doctor_page.render(diagnosis)
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "\x1b" not in page + printed(diagnosis)


def test_a_history_without_events_has_a_page_without_a_timeline():
    diagnosis = diagnose(dataclasses.replace(training(), events=()))
    assert 'id="plot"' not in doctor_page.render(diagnosis)
    assert "No events were recorded" in " ".join(printed(diagnosis).split())


def test_json_is_versioned_and_whole():
    data = json.loads(json.dumps(diagnosis_data(diagnose(refused()), top=2)))
    assert (data["format"], data["version"]) == ("memfit.doctor", 1)
    assert data["replayed_exactly"]
    assert len(data["by_line"]) == 2
    assert data["out_of_memory"][0]["requested_bytes"] == 90 * 2**20
