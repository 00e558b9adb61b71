import io

import pytest
from rich.console import Console
from rich.progress import Progress

from memfit.cli.progress import Display, display, solving_words
from memfit.plan.solve import Found
from memfit.progress import progress_line


def test_the_state_of_a_search_is_one_line():
    words = solving_words(Found(seconds=2.0, slowdown=0.05, bound=0.01, stages=3))
    assert "best +5.0%" in words
    assert "bound +1.0%" in words
    assert "2.0 s" in words
    assert "no plan yet" in solving_words(Found(seconds=2.0, slowdown=None, bound=0.01, stages=3))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_display_shows_what_it_is_told_and_goes_away_for_others(is_terminal):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=120)
    with Progress("{task.description}", console=console, disable=not is_terminal, transient=True) as progress:
        shown = Display(progress)
        shown.doing("building")
        shown.measured(1, 2)
        shown.ran(1, 2)
        shown.found(Found(seconds=2.0, slowdown=0.05, bound=0.01, stages=3))
        progress.refresh()
        with shown.hidden():
            assert not progress.live.is_started
    assert ("best +5.0%" in stream.getvalue()) is is_terminal


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys):
    with display() as shown:
        shown.doing("building")
        with shown.hidden():
            pass
    assert capsys.readouterr().err.strip() == ""


def test_calls_of_a_command_speak_through_its_display():
    counts = []
    with display() as shown:
        with progress_line(None, "tracing") as line:
            assert line is shown
        with progress_line(lambda done, total: counts.append((done, total)), "tracing") as line:
            line.measured(1, 2)
            line.doing("timing")  # goes to the display
            assert shown._progress.tasks[0].description == "timing"
    assert counts == [(1, 2)]
