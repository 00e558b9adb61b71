"""Plans that exist already: in a file, or in the zoo."""

from pathlib import Path

from memfit import zoo
from memfit.errors import InvalidFile
from memfit.plan.plan import Plan
from memfit.spelling import suggestion

PLAN_HELP = "A plan that exists: a file that `memfit plan` wrote, or zoo:NAME for one of `memfit zoo list`."
_ZOO = "zoo:"


def stored_plan(name: str) -> Plan:
    """The plan of a file, or of the zoo."""
    if name.startswith(_ZOO):
        return zoo.open_plan(name.removeprefix(_ZOO))
    path = Path(name).expanduser()
    if not path.exists():
        known = [str(each) for each in path.parent.glob("*.json")] + [_ZOO + each.name for each in zoo.entries()]
        raise InvalidFile(
            f"there is no file {name!r}{suggestion(name, known)}; make one with memfit plan --output, or name one of "
            "`memfit zoo list` as zoo:NAME"
        )
    return Plan.load(path)


def complete_plan_names(incomplete: str) -> list[str]:
    """What a shell offers: plans of the zoo, and files here."""
    files = [str(each) for each in Path.cwd().glob("*.json")]
    names = [Path(each).name for each in files] + [_ZOO + each.name for each in zoo.entries()]
    return [name for name in names if name.startswith(incomplete)]
