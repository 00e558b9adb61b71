import io
import logging
import threading
import time

import pytest
import torch
from rich.console import Console
from torch import nn

import memfit
from memfit import progress
from memfit.plan.solve import Found
from memfit.progress import progress_line, speaking


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that keeps what is written on it; lines come after 50 ms."""
    stream = io.StringIO()
    monkeypatch.setattr(progress, "_is_terminal", lambda: True)
    monkeypatch.setattr(progress, "_console", lambda: Console(file=stream, force_terminal=True, width=100))
    monkeypatch.setattr(progress, "_QUIET_S", 0.05)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.02)
    return stream


@pytest.fixture
def quick_log(monkeypatch, caplog):
    """The log of a run without a terminal; lines come after 50 ms."""
    monkeypatch.setattr(progress, "_is_terminal", lambda: False)
    monkeypatch.setattr(progress, "_QUIET_S", 0.05)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.02)
    caplog.set_level(logging.INFO, logger="memfit")
    return caplog


def model_and_batch():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))), torch.randn(64, 32)


def said(log):
    return [record.getMessage() for record in log.records if record.name == "memfit"]


def wait_for(is_there):
    end = time.monotonic() + 5
    while not is_there() and time.monotonic() < end:
        time.sleep(0.01)
    assert is_there()


def test_a_terminal_shows_one_line_that_is_wiped_away(terminal):
    with progress_line(None, "tracing") as line:
        wait_for(lambda: "tracing" in terminal.getvalue())
        line.measured(34, 120)
        wait_for(lambda: "measuring operators 34/120" in terminal.getvalue())
        line.found(Found(seconds=2.0, slowdown=0.05, bound=0.01, stages=3))
        wait_for(lambda: "best +5.0%" in terminal.getvalue())
    assert terminal.getvalue().count("\n") == 1  # where it stood
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")  # up again, and the line wiped


def test_the_thread_ends_with_the_call_also_with_an_error(terminal):
    before = threading.active_count()

    def fails():
        with progress_line(None, "tracing"):
            wait_for(lambda: "tracing" in terminal.getvalue())
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fails()
    assert threading.active_count() == before


def test_a_short_call_shows_nothing(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", 1.0)
    with progress_line(None, "tracing") as line:
        line.measured(1, 2)
    assert terminal.getvalue() == ""


def test_without_a_terminal_every_stage_is_one_line_of_the_log(quick_log):
    with progress_line(True, "tracing") as line:
        wait_for(lambda: said(quick_log) == ["tracing"])
        for done in range(34, 38):
            line.counted("measuring operators", done, 120)
            time.sleep(0.05)
        line.doing("planning")
        wait_for(lambda: said(quick_log)[-1] == "planning")
    assert said(quick_log) == ["tracing", "measuring operators 34/120", "planning"]


def test_a_stage_that_goes_on_is_logged_again(quick_log, monkeypatch):
    monkeypatch.setattr(progress, "_LOG_AGAIN_S", 0.1)
    with progress_line(None, "tracing") as line:
        line.counted("measuring operators", 1, 120)
        wait_for(lambda: said(quick_log) == ["measuring operators 1/120"])
        line.counted("measuring operators", 90, 120)
        wait_for(lambda: said(quick_log)[-1] == "measuring operators 90/120")


def test_nothing_runs_where_nobody_listens(monkeypatch):
    monkeypatch.setattr(progress, "_is_terminal", lambda: False)
    logging.getLogger("memfit").setLevel(logging.NOTSET)
    before = threading.active_count()
    with progress_line(None, "tracing"):
        assert threading.active_count() == before


@pytest.mark.parametrize("rank", ["1", "3"])
def test_of_several_ranks_the_first_speaks(terminal, monkeypatch, rank):
    monkeypatch.setenv("LOCAL_RANK", rank)
    with progress_line(None, "tracing"):
        time.sleep(0.15)
    assert terminal.getvalue() == ""


def test_calls_inside_a_call_speak_through_its_line(terminal):
    with progress_line(None, "choosing") as outer, progress_line(None, "tracing") as inner:
        assert inner is outer
    with progress_line(False, "choosing") as outer, progress_line(None, "tracing") as inner:
        assert inner is outer
    shown = progress.ProgressLine()
    with speaking(shown), progress_line(None, "tracing") as inner:
        assert inner is shown
    assert terminal.getvalue() == ""


def test_fit_and_its_like_say_what_they_do(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    monkeypatch.setattr(progress, "_REFRESH_S", 0.001)
    model, batch = model_and_batch()
    memfit.fit(model, batch, 0.8, time_limit=0.3)
    memfit.remove(model)
    assert "tracing a training step" in terminal.getvalue()
    assert "planning" in terminal.getvalue()
    plan = memfit.plan(model, batch, budget=0.8, time_limit=0.3, progress=False)
    for call, words in (
        (lambda: memfit.check(model, plan, batch), "running an eager and a planned step"),
        (lambda: memfit.profile(model, plan, batch, pairs=2), "measuring peaks"),
        (lambda: memfit.frontier(model, batch, fractions=(0.8,), time_limit=0.4), "planning"),
        (lambda: memfit.estimate(model, batch), "tracing a training step"),
        (lambda: chosen_step(model, batch), "choosing techniques"),
    ):
        terminal.seek(0)
        terminal.truncate()
        call()
        assert words in terminal.getvalue()


def chosen_step(model, batch, **keywords):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memfit.Step(model, optimizer, loss, budget=0.9, sample=batch, time_limit=0.5, **keywords)


def loss(model, batch):
    return model(batch).square().mean()


def test_progress_false_is_silent(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    model, batch = model_and_batch()
    plan = memfit.plan(model, batch, budget=0.8, time_limit=0.3, progress=False)
    memfit.check(model, plan, batch, progress=False)
    memfit.profile(model, plan, batch, pairs=1, progress=False)
    memfit.frontier(model, batch, fractions=(0.8,), time_limit=0.4, progress=False)
    chosen_step(model, batch, progress=False)
    memfit.fit(model, batch, 0.8, time_limit=0.3, progress=False)
    assert terminal.getvalue() == ""


def test_callbacks_are_told_as_before_and_nothing_is_shown(terminal, monkeypatch, tmp_path):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))  # nothing is measured yet
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    model, batch = model_and_batch()
    counts, states, pairs = [], [], []
    plan = memfit.plan(
        model,
        batch,
        budget=0.8,
        time_limit=0.3,
        progress=lambda done, total: counts.append((done, total)),
        report=states.append,
    )
    memfit.profile(model, plan, batch, pairs=2, progress=lambda done, total: pairs.append((done, total)))
    assert counts
    assert counts[-1][0] == counts[-1][1]
    assert all(isinstance(state, Found) for state in states)
    assert states
    assert pairs == [(1, 2), (2, 2)]
    assert terminal.getvalue() == ""
