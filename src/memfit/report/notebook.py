"""Small fragments of HTML for notebooks: an estimate, a plan, a frontier. Registered with `memfit.display`.

A fragment carries its styles with it, changes nothing around it, needs no script, and takes its text colour from the
notebook, light or dark.
"""

import html
from collections.abc import Iterable, Sequence

from memfit.display import html_of
from memfit.errors import InvalidFile
from memfit.estimate import Estimate
from memfit.ir import Kind
from memfit.plan.frontier import Frontier, activation_fraction
from memfit.plan.plan import Plan, Treatment
from memfit.report import breakdown, plan_summary
from memfit.report.breakdown import printable
from memfit.report.plan_page import COLOURS
from memfit.report.shades import LIGHT, shade_of, slug
from memfit.report.story import stories_of
from memfit.units import format_bytes

_WIDTH, _HEIGHT = 560, 120
_MOST_POINTS = 400
_MOST_ROWS = 12
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums;margin:6px 0"
_CELL = "padding:2px 14px 2px 0;text-align:{side};border:0;background:none"


@html_of.register
def _estimate_html(estimate: Estimate) -> str:
    sizes = estimate.by_kind()
    bar = _bar((size, LIGHT[slug(shade_of(kind, is_again=False))]) for kind, size in sizes.items())
    rows = [
        (
            _swatch(LIGHT[slug(shade_of(kind, is_again=False))]) + _text(kind),
            format_bytes(size),
            _percent(size, estimate.peak_bytes),
        )
        for kind, size in sizes.items()
    ]
    activation_bytes = max(moment.by_kind.get(Kind.ACTIVATION, 0) for moment in estimate.timeline.moments)
    where = f"{breakdown.step_words(estimate)} on {estimate.device}"
    below = f"{where}; activations take up to {format_bytes(activation_bytes)}"
    line = _sparkline([moment.live_bytes for moment in estimate.timeline.moments], None, None)
    title = f"{printable(estimate.model)}: {format_bytes(estimate.peak_bytes)} at the peak"
    return _fragment(title, below, bar + line + _table(("at the peak", "size", "share"), rows))


@html_of.register
def _plan_html(plan: Plan) -> str:
    totals = plan_summary.totals(plan)
    used = [each for each in Treatment if totals[each]]
    bar = _bar((totals[each], LIGHT[COLOURS[each]]) for each in used)
    words = " ".join(
        f"<span style='white-space:nowrap;margin-right:14px'>{_swatch(LIGHT[COLOURS[each]])}{_text(each)} "
        f"{format_bytes(totals[each])}</span>"
        for each in used
    )
    figures = [(_text(each.label), _text(each.value), _text(each.remark)) for each in plan_summary.figures(plan)]
    budget = "" if plan.budget_bytes is None else f"; budget {format_bytes(plan.budget_bytes)}"
    peaks = f"{format_bytes(plan.peak_bytes)} instead of {format_bytes(plan.unplanned_peak_bytes)}"
    title = f"{plan_summary.step_words(plan)}: {peaks}"
    below = f"{plan.slowdown:+.1%} time{budget}; sample {printable(plan.sample) or 'without tensors'}"
    return _fragment(
        title, below, bar + f"<div>{words}</div>" + _plan_line(plan) + _table(("", "", ""), figures, head=False)
    )


@html_of.register
def _frontier_html(frontier: Frontier) -> str:
    rows = [
        (
            format_bytes(plan.peak_bytes),
            f"{activation_fraction(plan):.0%}",
            f"{plan.slowdown:+.1%}",
            f"{plan.lower_bound:+.1%}",
            _bar(
                [
                    (plan.peak_bytes, LIGHT["activation"]),
                    (max(0, plan.unplanned_peak_bytes - plan.peak_bytes), LIGHT["line"]),
                ],
                160,
            ),
        )
        for plan in frontier
    ]
    first = next(iter(frontier), None)
    title = "Frontier" if first is None else f"Frontier of {plan_summary.step_words(first)}"
    below = "no points" if first is None else f"unplanned peak {format_bytes(first.unplanned_peak_bytes)}"
    return _fragment(title, below, _table(("peak", "activations", "time", "bound", ""), rows))


def _plan_line(plan: Plan) -> str:
    try:
        stories = stories_of(plan)
    except InvalidFile:  # the page says what is wrong; a cell of a notebook goes on
        return ""
    if len(stories) != 1:
        return ""
    story = stories[0]
    return _sparkline(story.planned.totals(story.values), story.unplanned.totals(story.values), plan.budget_bytes)


def _fragment(title: str, below: str, body: str) -> str:
    return (
        "<div style='font:13px/1.5 system-ui,sans-serif;max-width:640px;overflow-x:auto'>"
        f"<div style='font-size:15px;font-weight:600'>{_text(title)}</div>"
        f"<div style='opacity:.7'>{_text(below)}</div>{body}</div>"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, head: bool = True) -> str:
    """Cells of rows are markup already; the first column is words, the others are numbers."""

    def cell(tag: str, number: int, content: str) -> str:
        style = _CELL.format(side="left" if not number else "right")
        return f"<{tag} style='{style}'>{content}</{tag}>"

    def line(tag: str, cells: Iterable[str]) -> str:
        return (
            "<tr style='background:none'>"
            + "".join(cell(tag, number, each) for number, each in enumerate(cells))
            + "</tr>"
        )

    titled = f"<thead>{line('th', map(_text, titles))}</thead>" if head else ""
    more = len(rows) - _MOST_ROWS
    rest = line("td", [f"and {more} more"]) if more > 0 else ""
    body = "".join(line("td", row) for row in rows[:_MOST_ROWS])
    return f"<table style='{_TABLE}'>{titled}<tbody>{body}{rest}</tbody></table>"


def _bar(parts: Iterable[tuple[int, str]], width: int = _WIDTH) -> str:
    cells = "".join(f"<span style='flex:{size} 0 0;background:{colour}'></span>" for size, colour in parts if size)
    return f"<div style='display:flex;gap:1px;height:12px;width:{width}px;max-width:100%;margin:6px 0'>{cells}</div>"


def _sparkline(front: Sequence[int], behind: Sequence[int] | None, budget_bytes: int | None) -> str:
    """Live bytes over the moments of a step: one filled, the other a line, the budget dashed."""
    highest = 1.05 * max(1, *front, *(behind or ()), budget_bytes or 0)
    area = f"M0 {_HEIGHT}L{_points(front, highest)} {_WIDTH} {_HEIGHT}Z"
    shapes = [f"<path d='{area}' fill='{LIGHT['activation']}' opacity='.85'/>"]
    if behind:
        shapes.append(f"<path d='M{_points(behind, highest)}' fill='none' stroke='currentColor' stroke-width='1.2'/>")
    if budget_bytes:
        y = _HEIGHT * (1 - budget_bytes / highest)
        shapes.append(
            f"<path d='M0 {y:.1f}H{_WIDTH}' stroke='{LIGHT['budget']}' stroke-width='1.5' stroke-dasharray='6 4'/>"
        )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' height='{_HEIGHT}' role='img' "
        "style='max-width:100%;height:auto;display:block;margin:8px 0' "
        f"aria-label='Live bytes through the step, at most {format_bytes(max(front))}'>{''.join(shapes)}</svg>"
    )


def _points(heights: Sequence[int], highest: float) -> str:
    stretch = -(-len(heights) // _MOST_POINTS)
    kept = [max(heights[start : start + stretch]) for start in range(0, len(heights), stretch)]
    return " ".join(
        f"{_WIDTH * number / max(1, len(kept) - 1):.1f} {_HEIGHT * (1 - height / highest):.1f}"
        for number, height in enumerate(kept)
    )


def _swatch(colour: str) -> str:
    style = f"display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;background:{colour}"
    return f"<span style='{style}'></span>"


def _percent(size_bytes: int, whole_bytes: int) -> str:
    return f"{size_bytes / max(1, whole_bytes):.1%}"


def _text(words: str) -> str:
    return html.escape(printable(str(words)))
