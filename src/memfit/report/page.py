"""An estimate as one HTML file that needs nothing else.

Names of models, modules and files are untrusted text: the template escapes all of them, the
script gets them as JSON that cannot end its element, and the page's own policy lets no other
script run and nothing be loaded.
"""

import base64
import hashlib
import importlib.metadata
import importlib.resources

import jinja2

from memfit.estimate import Estimate
from memfit.ir import Kind
from memfit.report import breakdown, timeline
from memfit.report.limit import Limit
from memfit.units import format_bytes

_MOST_MODULES = 40  # a page has more room than a terminal


def render(estimate: Estimate, limit: Limit | None = None, *, top: int = 10, depth: int | None = None) -> str:
    """The page of an estimate, held against `limit` if there is one."""
    drawing = timeline.draw(estimate, limit)
    return _template().render(
        version=importlib.metadata.version("memfit"),
        estimate=estimate,
        model=breakdown.printable(estimate.model),
        step=breakdown.step_words(estimate),
        batch=breakdown.batch_words(estimate),
        place=breakdown.peak_place(estimate),
        cards=_cards(estimate, limit),
        limit=limit,
        verdict="" if limit is None else breakdown.verdict(estimate, limit),
        range_words=breakdown.range_words(estimate),
        loop_words=breakdown.loop_words(estimate),
        drawing=drawing,
        width=timeline.WIDTH,
        height=timeline.HEIGHT,
        data=timeline.data_for_script(drawing),
        kinds=breakdown.kind_rows(estimate),
        modules=breakdown.module_rows(estimate, depth=depth, limit=max(top, _MOST_MODULES)),
        values=breakdown.value_rows(estimate, top),
        parameters=breakdown.parameter_rows(estimate),
        notes=breakdown.note_lines(estimate),
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": format_bytes,
        "percent": lambda share: f"{share:.1%}",
        "place": lambda share: f"{100 * share:.3f}%",
        "slug": lambda kind: str(kind).replace(" ", "-"),
        "digest": script_digest,
    }
    text = importlib.resources.files("memfit.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(text)


def script_digest(script: str) -> str:
    """How a content security policy names the one script it allows."""
    return "sha256-" + base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()


def _cards(estimate: Estimate, limit: Limit | None) -> list[tuple[str, str, str]]:
    """The figures on top: title, figure, and a line below it."""
    count = sum(each.count for each in estimate.parameters)
    activation_bytes = max(moment.by_kind.get(Kind.ACTIVATION, 0) for moment in estimate.timeline.moments)
    activation_share = activation_bytes / max(1, estimate.peak_bytes)
    cards = [
        ("Peak", format_bytes(estimate.peak_bytes), f"{estimate.peak_bytes:,} bytes"),
        ("Before the step", format_bytes(estimate.timeline.resident_bytes), "parameters, buffers, state, batch"),
        ("Activations", format_bytes(activation_bytes), f"at most, {activation_share:.1%} of the peak"),
        ("Parameters", _short_count(count), f"{count:,}"),
    ]
    if estimate.reserved is not None:
        best = f"{format_bytes(estimate.reserved.best_reserved_bytes)} with {estimate.reserved.best_setting}"
        below = best if estimate.reserved.best_setting else "by the caching allocator"
        cards.insert(1, ("Reserved", format_bytes(estimate.reserved.reserved_bytes), below))
    if limit is not None:
        below = limit.label if limit.is_device else "as given"
        cards.insert(1, ("Usable memory", format_bytes(limit.usable_bytes), below))
    return cards


def _short_count(count: int) -> str:
    """A count in three digits.

    >>> _short_count(25_557_032), _short_count(6_738_415_616), _short_count(12)
    ('25.6 M', '6.74 G', '12')
    """
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
