"""What `check` and `profile` found, for the terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from memfit.prove.check import Check
from memfit.prove.profile import Profile
from memfit.report.breakdown import printable
from memfit.report.tables import plain_table
from memfit.units import format_bytes


def print_check(console: Console, check: Check) -> None:
    """Print how a planned step compares with the eager one."""
    table = plain_table(f"{printable(check.model)}, planned against eager, seed {check.seed}")
    for title in ("part", "equal bit for bit", "largest difference"):
        table.add_column(title, overflow="fold")
    for each in check.comparisons:
        equal = each.equal == each.compared
        worst = "" if equal else f"{each.largest_difference:.1e} in {printable(each.worst)}"
        table.add_row(each.part, f"{each.equal} of {each.compared}", Text(worst))
    console.print(table)
    console.print()
    console.print(Text(printable(check.how)))
    console.print(Text(check_verdict(check), style="bold green" if check.passed else "bold red"))


def check_verdict(check: Check) -> str:
    """The answer in one line, and what it was judged by."""
    if check.exact:
        return "EQUAL bit for bit"
    if check.passed:
        return f"EQUAL within the tolerance of {check.tolerance:g}"
    rule = "bit for bit" if check.tolerance == 0 else f"within {check.tolerance:g}"
    return f"DIFFERENT: the planned step was to be equal {rule}"


def print_profile(console: Console, profile: Profile) -> None:
    """Print what a planned step takes, beside what was predicted and beside the eager step."""
    table = plain_table(f"{printable(profile.model)}, planned against eager")
    for title in ("", "planned", "predicted", "eager"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for row in _profile_rows(profile):
        table.add_row(*row)
    console.print(table)
    console.print()
    console.print(Text(profile_verdict(profile), style="bold green" if profile.fits else "bold red"))


def _profile_rows(profile: Profile) -> Iterator[tuple[str, str, str, str]]:
    error = profile.predicted_peak_bytes / profile.peak_bytes - 1
    eager_peak = "" if profile.eager_peak_bytes is None else format_bytes(profile.eager_peak_bytes)
    yield (
        "peak",
        format_bytes(profile.peak_bytes),
        f"{format_bytes(profile.predicted_peak_bytes)} ({error:+.2%})",
        eager_peak,
    )
    if profile.slowdown is not None:
        yield "time", f"{profile.slowdown:+.1%}", f"{profile.predicted_slowdown:+.1%}", ""
    yield "step", f"{1000 * profile.step_s:.1f} ms", "", ""


def profile_verdict(profile: Profile) -> str:
    """Whether the measured peak is within the budget."""
    if profile.budget_bytes is None:
        return f"no budget: {format_bytes(profile.peak_bytes)} measured"
    budget = f"the budget of {format_bytes(profile.budget_bytes)}"
    over = profile.peak_bytes / profile.budget_bytes - 1
    if over <= 0:
        return f"WITHIN {budget} with {format_bytes(profile.budget_bytes - profile.peak_bytes)} to spare"
    if profile.fits:
        return f"WITHIN {budget}, up to {over:.2%}"
    return f"OVER {budget} by {format_bytes(profile.peak_bytes - profile.budget_bytes)} ({over:.1%})"
