"""A plan as one HTML file that needs nothing else: timeline, animation, modules, frontier, measurements, tables.

Names of models, modules and values are untrusted text: the template escapes all of them, the script gets them as JSON
that cannot end its element and writes them as text, and the page's own policy lets no other script run and
nothing be loaded.
"""

import importlib.metadata
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from memfit.plan.plan import Fate, Plan, Treatment
from memfit.prove.profile import Profile
from memfit.report import curve, plan_summary
from memfit.report.breakdown import printable
from memfit.report.curve import CurvePoint
from memfit.report.measured import measured_of
from memfit.report.page import script_digest
from memfit.report.passes import pass_rows
from memfit.report.shades import DARK, LIGHT, SHADES, slug
from memfit.report.story import Story, stories_of
from memfit.report.story_data import data_of
from memfit.units import format_bytes

_MOST_VALUES = 500
_MOST_MODULES = 80
COLOURS = {
    Treatment.KEPT: "activation",
    Treatment.AGAIN: "again",
    Treatment.REPLACED: "output",
    Treatment.MOVED: "gradient",
}


def render(plan: Plan, frontier: Sequence[CurvePoint] = (), profile: Profile | None = None) -> str:
    """The page of a plan, with its place on a frontier and with what was measured, if these are given."""
    stories = stories_of(plan)
    depth = plan_summary.automatic_depth(plan)
    return page_template("plan_page.html").render(
        version=importlib.metadata.version("memfit"),
        script=Markup(page_file("plan_page.js")),
        style=Markup(page_file("plan_page.css")),
        palette=Markup(palette_css()),
        plan=plan,
        model=printable(plan.model),
        subtitle=_subtitle(plan),
        verdict=list(_verdict(plan)),
        fits=plan.budget_bytes is not None and plan.peak_bytes <= plan.budget_bytes,
        cards=list(_cards(plan)),
        stories=[story.name or "the whole step" for story in stories],
        shades=[{"slug": slug(shade), "label": str(shade)} for shade in SHADES],
        data=data_of(plan, stories, depth),
        curve=curve.draw(frontier, plan) if frontier else None,
        measured=None if profile is None else measured_of(profile, plan.unplanned_peak_bytes),
        passes=pass_rows(stories[0], depth) if len(stories) == 1 and not plan.regions else [],
        notes=_notes(plan, stories),
        log=list(_log(plan)),
        sent_out=any(fate.treatment is Treatment.MOVED for fate in plan.fates),
        techniques=plan_summary.techniques(plan),
        **_modules(plan),
        **_values(plan, stories),
    )


def palette_css() -> str:
    """The colours as custom properties: light, dark where the reader's system is, and either by choice."""
    light, dark = (";".join(f"--{name}:{colour}" for name, colour in each.items()) for each in (LIGHT, DARK))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f'@media (prefers-color-scheme: dark){{:root:not([data-theme="light"]){{color-scheme:dark;{dark}}}}}\n'
        f':root[data-theme="dark"]{{color-scheme:dark;{dark}}}\n'
        f"@media print{{:root:root{{color-scheme:light;{light}}}}}"
    )


def page_template(name: str) -> jinja2.Template:
    """Read the template of a page: everything put into it is escaped, and nothing may be missing."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": format_bytes,
        "percent": lambda share: f"{share:.1%}",
        "place": lambda share: f"{100 * share:.3f}%",
        "digest": script_digest,
        "tojson": _json_for_script,
    }
    return environment.from_string(page_file(name))


def page_file(name: str) -> str:
    """Read a file that pages are made of."""
    return importlib.resources.files("memfit.report").joinpath(name).read_text(encoding="utf-8")


def _json_for_script(data: Any) -> Markup:
    """JSON without a letter that could end a script element or begin a comment in it."""
    text = json.dumps(data, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _subtitle(plan: Plan) -> str:
    step = f"Training step with {plan.optimizer}" if plan.optimizer else "Forward and backward"
    return printable(f"{step} on {plan.device}, {plan.sample or 'without tensors'}")


def _verdict(plan: Plan) -> Iterator[tuple[str, bool]]:
    """The answer in one sentence: words, and whether they are strong."""
    if plan.budget_bytes is not None:
        fits = plan.peak_bytes <= plan.budget_bytes
        yield f"{'Fits' if fits else 'Does not fit'} {format_bytes(plan.budget_bytes)}", True
        yield ": ", False
    if plan.is_identity and plan.peak_bytes >= plan.unplanned_peak_bytes:
        yield "the unplanned step peaks at ", False
        yield format_bytes(plan.unplanned_peak_bytes), True
        yield ", so nothing is computed again.", False
        return
    yield "the planned step peaks at " if plan.budget_bytes is not None else "The planned step peaks at ", False
    yield format_bytes(plan.peak_bytes), True
    yield f" instead of {format_bytes(plan.unplanned_peak_bytes)}, {_share(plan)} of it, for ", False
    yield f"{abs(plan.slowdown):.1%} {'more' if plan.slowdown >= 0 else 'less'} time", True
    yield "." if plan.times_measured else " (estimated).", False


def _share(plan: Plan) -> str:
    return f"{plan.peak_bytes / max(1, plan.unplanned_peak_bytes):.0%}"


def _cards(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """The figures on top: title, figure, and a line below it."""
    budget = "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    yield "Budget", budget, "" if plan.budget_bytes is None else "for the peak of a whole step"
    yield "Planned peak", format_bytes(plan.peak_bytes), f"{_share(plan)} of the unplanned"
    yield "Unplanned peak", format_bytes(plan.unplanned_peak_bytes), "as the model runs by itself"
    floor = "the smallest plan that was found" if plan.regions else "no plan of these operations is below"
    yield "Floor", format_bytes(plan.floor_bytes), floor
    yield (
        "Extra time",
        f"{plan.slowdown:+.1%}",
        "from measured times" if plan.times_measured else "from estimated times",
    )
    bound = "not known" if plan.regions else f"{plan.lower_bound:+.1%}"
    yield "At best", bound, "" if plan.regions else "no plan of this budget is faster"


def _modules(plan: Plan) -> Mapping[str, Any]:
    totals = plan_summary.totals(plan)
    rows = [(row, sum(row.sizes.values())) for row in plan_summary.module_rows(plan, top=_MOST_MODULES)]
    return {
        "modules": [
            {"label": row.label, "sizes": {str(key): size for key, size in row.sizes.items()}, "total": total}
            for row, total in rows
        ],
        "biggest_module": max((total for _, total in rows), default=1),
        "treatments": [
            {"key": str(each), "label": str(each), "colour": COLOURS[each], "total": totals[each]}
            for each in Treatment
            if totals[each] or each is Treatment.KEPT
        ],
    }


def _values(plan: Plan, stories: Sequence[Story]) -> Mapping[str, Any]:
    shapes = {
        (f"{story.name}.{value.module}".strip(".") if story.name else value.module, value.name): value
        for story in stories
        for value in story.values
    }
    biggest = sorted(plan.fates, key=lambda fate: -fate.size_bytes)[:_MOST_VALUES]
    return {"value_count": len(plan.fates), "values": [_value_row(fate, shapes) for fate in biggest]}


def _value_row(fate: Fate, shapes: Mapping[tuple[str, str], Any]) -> Mapping[str, Any]:
    module, name = printable(fate.module), printable(fate.value)
    value = shapes.get((module, name))
    words = str(fate.treatment)
    if fate.technique and fate.treatment is Treatment.REPLACED:
        words = f"replaced by {printable(fate.technique)}"
    elif fate.runs_again > 1:
        words = f"{words}, {fate.runs_again} times"
    return {
        "module": module or plan_summary.OUTSIDE,
        "name": name,
        "shape": "" if value is None else f"{value.shape} {value.dtype}",
        "size_bytes": fate.size_bytes,
        "colour": COLOURS[fate.treatment],
        "words": words,
    }


def _notes(plan: Plan, stories: Sequence[Story]) -> list[str]:
    notes = [_sentence(note) for note in plan_summary.notes(plan)]
    if not stories:
        notes.append(
            "This plan was written without the step it was made for, so there is no timeline and no animation; "
            "plan again to have them."
        )
    elif plan.regions:
        notes.append(
            "The timeline is that of one region at a time, without what is around it: the whole step was measured, not "
            "simulated operation by operation."
        )
    return notes


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _log(plan: Plan) -> Iterator[str]:
    yield f"Techniques that were allowed: {', '.join(map(printable, plan.allow)) or 'none'}."
    yield f"Floor: {format_bytes(plan.floor_bytes)}, set by {printable(plan.floor_operation)}."
    yield from (f"Search, {printable(line)}" for line in plan.log)
    yield f"Planned in {plan.plan_seconds:.1f} s."
    yield f"Made with torch {printable(plan.torch_version)}; digest of the model {printable(plan.model_digest)}."
