"""A plan for the terminal."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from memfit.plan.plan import Plan, Treatment
from memfit.report import plan_summary
from memfit.report.breakdown import printable
from memfit.report.tables import plain_table
from memfit.units import format_bytes

_COLOURS = {
    Treatment.KEPT: "green",
    Treatment.AGAIN: "yellow",
    Treatment.REPLACED: "cyan",
    Treatment.MOVED: "magenta",
}


def print_plan(console: Console, plan: Plan, *, top: int = 20, depth: int | None = None) -> None:
    """Print everything there is to say about a plan."""
    for part in _parts(plan, top, depth):
        console.print(part)
        console.print()


def _parts(plan: Plan, top: int, depth: int | None) -> Iterator[RenderableType]:
    yield Text(f"{plan_summary.step_words(plan)}\nSample {printable(plan.sample) or 'without tensors'}")
    yield figure_table(plan)
    if plan.fates and not plan.is_identity:
        yield module_table(plan, top, depth)
    if notes := plan_summary.notes(plan):
        yield Text("\n").join(Text.assemble(("note: ", "bold"), note) for note in notes)


def figure_table(plan: Plan) -> Table:
    """The numbers of a plan."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for figure in plan_summary.figures(plan):
        table.add_row(figure.label, figure.value, Text(figure.remark))
    return table


def module_table(plan: Plan, top: int = 20, depth: int | None = None) -> Table:
    """What is kept, computed again and replaced, by module."""
    totals = plan_summary.totals(plan)
    used = [treatment for treatment, size_bytes in totals.items() if size_bytes]
    table = plain_table("Activations that the backward pass reads")
    table.add_column("module", overflow="fold")
    for treatment in used:
        table.add_column(treatment.value, justify="right", no_wrap=True, style=_COLOURS[treatment])
    for row in plan_summary.module_rows(plan, depth=depth, top=top):
        table.add_row(Text(row.label), *(_cell(row.sizes[treatment]) for treatment in used))
    table.add_section()
    table.add_row("all", *(_cell(totals[treatment]) for treatment in used))
    for technique, size_bytes in plan_summary.techniques(plan).items():
        cells = [_cell(size_bytes) if treatment is Treatment.REPLACED else "" for treatment in used]
        table.add_row(f"of it by {technique}", *cells)
    return table


def _cell(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes else ""
