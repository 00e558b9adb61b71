"""`memfit.report`: a plan as a file for people, whole or not at all."""

from collections.abc import Callable, Sequence
from pathlib import Path

from memfit.errors import InvalidFile, InvalidInput
from memfit.files import atomic_file
from memfit.plan.frontier import Frontier
from memfit.plan.plan import Plan
from memfit.prove.profile import Profile
from memfit.report import film, picture, plan_page
from memfit.report.curve import CurvePoint, load_points, points_of
from memfit.units import format_bytes

FORMATS = ("html", "png", "svg", "gif")
Progress = Callable[[int, int], None]
FilePath = str | Path


def report(
    plan: Plan | FilePath,
    path: FilePath,
    *,
    format: str | None = None,
    frontier: Frontier | FilePath | None = None,
    profile: Profile | FilePath | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a plan down for people, and return where.

    As "html", one page that needs nothing else: the timeline of the planned and the unplanned step, an animation, what
    happens to every module and value, and, if they are given, the plan's place on a `frontier` and what a
    `profile` measured. As "png" or "svg", the timeline for papers; as "gif", the animation. Without a `format` the
    name of the file says it. Plan, frontier and profile are objects or files. A file that is there already is
    left alone unless `overwrite` is true.
    """
    target = Path(path)
    kind = format_of(target, format)
    refuse_to_overwrite(target, overwrite=overwrite)
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    content = rendered(found, kind, points=_points(frontier), profile=_profile(profile, found), progress=progress)
    try:
        with atomic_file(target) as file:
            file.write(content)
    except OSError as error:
        raise InvalidInput(
            f"the report could not be written to {str(target)!r} ({error.strerror or error}); give another path"
        ) from None
    return target


def format_of(path: Path, wanted: str | None) -> str:
    """The format that was asked for, or that the name of a file says.

    >>> format_of(Path("plan.svg"), None), format_of(Path("plan"), None), format_of(Path("plan.svg"), "png")
    ('svg', 'html', 'png')
    """
    kind = wanted or path.suffix.lower().lstrip(".") or "html"
    if kind not in FORMATS:
        raise InvalidInput(f"a report cannot be written as {kind!r}; write {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    return kind


def refuse_to_overwrite(path: Path, *, overwrite: bool) -> None:
    """Leave a file alone that nobody said may go."""
    if path.exists() and not overwrite:
        raise InvalidInput(f"{str(path)!r} is there already and was left as it is; give another name, or overwrite it")


def rendered(
    plan: Plan,
    kind: str,
    *,
    points: Sequence[CurvePoint] = (),
    profile: Profile | None = None,
    progress: Progress | None = None,
) -> bytes:
    """The content of the file."""
    if kind == "html":
        return plan_page.render(plan, points, profile).encode()
    if kind == "gif":
        return film.film(plan, progress)
    return picture.picture(plan, kind)


def _points(frontier: Frontier | FilePath | None) -> list[CurvePoint]:
    if frontier is None:
        return []
    return points_of(frontier) if isinstance(frontier, Frontier) else load_points(frontier)


def _profile(profile: Profile | FilePath | None, plan: Plan) -> Profile | None:
    found = Profile.load(profile) if isinstance(profile, str | Path) else profile
    if found is not None and found.predicted_peak_bytes != plan.peak_bytes:
        raise InvalidFile(
            f"the profile is of another plan: it was predicted {format_bytes(found.predicted_peak_bytes)} for "
            f"{found.model}, and this plan says {format_bytes(plan.peak_bytes)} for {plan.model}; measure this plan"
        )
    return found
