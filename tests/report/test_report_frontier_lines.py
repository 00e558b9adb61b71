import io

from handmade_reports import MIB, make_plan
from rich.console import Console

from memfit.report.frontier_lines import FrontierLines


def lines_of(*plans):
    stream = io.StringIO()
    lines = FrontierLines(Console(file=stream, width=80))
    for plan in plans:
        lines.add(plan)
    lines.end()
    return stream.getvalue().splitlines()


def test_the_head_comes_with_the_first_point_and_every_point_is_a_line():
    lines = lines_of(make_plan(), make_plan(peak_bytes=8 * MIB, extra_us=200.0))
    assert lines[0] == "Net, training step with adamw, on cpu"
    assert lines[1] == "unplanned peak 20.00 MiB"
    assert lines[3].split() == ["peak", "activations", "time", "bound", "planned", "in"]
    assert lines[4].split() == ["11.00", "MiB", "44%", "+6.4%", "+3.1%", "1.2", "s"]
    assert lines[5].split()[:4] == ["8.00", "MiB", "25%", "+20.0%"]
    assert len({len(line) for line in lines[3:6]}) == 1


def test_a_line_is_there_as_soon_as_its_point_is():
    stream = io.StringIO()
    lines = FrontierLines(Console(file=stream, width=80))
    lines.add(make_plan())
    assert "+6.4%" in stream.getvalue()


def test_estimated_times_are_noted_at_the_end():
    assert lines_of(make_plan(times_measured=False))[-1] == "note: times are estimated, not measured"


def test_without_a_point_there_is_nothing():
    assert lines_of() == []
