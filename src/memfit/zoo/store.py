"""Where plans of the zoo lie: one compressed plan a file, and a list of what they are.

Note [Compressed plans]
    A plan of ResNet-50 is some 60 kB of JSON and 6 kB compressed. They are compressed one by one, as the JSON that
    `Plan.save` writes; `memfit zoo show NAME --output plan.json` writes it out.
"""

import dataclasses
import functools
import gzip
import importlib.resources
import json
import zlib
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from memfit.errors import InfeasibleBudget, InvalidFile, InvalidInput, first_line
from memfit.files import atomic_file, write_atomically
from memfit.measure.devices import find_device
from memfit.plan.plan import Plan
from memfit.recipe import Budget, budget_bytes, check_budget
from memfit.spelling import suggestion
from memfit.units import format_bytes
from memfit.zoo.entry import Entry
from memfit.zoo.sizes import Sizes

FORMAT = "memfit.zoo"
VERSION = 1
INDEX = "index.json"
_PLAN, _SIZES = ".json.gz", ".sizes.json.gz"


def own_folder() -> Traversable:
    """The folder of the zoo inside the package."""
    return importlib.resources.files("memfit.zoo") / "plans"


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Every plan of the zoo, by its figures."""
    return read_index(own_folder())


def find_entry(name: str) -> Entry:
    """The entry of a plan's name; an unknown name is answered with the nearest."""
    known = {each.name: each for each in entries()}
    if name not in known:
        raise InvalidInput(f"the zoo has no plan {name!r}{suggestion(name, known)}; `memfit zoo list` shows all")
    return known[name]


def open_plan(name: str) -> Plan:
    """The plan of this name."""
    return read_plan(own_folder(), find_entry(name))


def load(model: str, *, budget: Budget, batch_size: int | None = None, device: str | None = None) -> Plan:
    """The plan of a model that fills a budget best: the largest predicted peak that is not above it.

    `model` is a short name ("resnet50"), `budget` bytes, "6GiB", a fraction of the unplanned peak or "smallest".
    Without `batch_size` or `device` plans of all are looked at. Nothing is computed: if there is no such plan the
    answer is what there is.
    """
    if budget is None:
        raise InvalidInput('there is no budget; give bytes, "6GiB", a fraction of the unplanned peak, or "smallest"')
    check_budget(budget)
    candidates = _candidates(model, batch_size, device)
    if budget == "smallest":
        return read_plan(own_folder(), min(candidates, key=lambda each: each.peak_bytes))
    used = [(each.peak_bytes / budget_bytes(budget, each.unplanned_peak_bytes), each) for each in candidates]
    fitting = [(share, each) for share, each in used if share <= 1]
    if not fitting:
        asked = format_bytes(budget) if isinstance(budget, int) else f"{budget} of the unplanned peak"
        raise InfeasibleBudget(
            f"no plan of {model} in the zoo is within {budget if isinstance(budget, str) else asked}; there are "
            f"{_listed(candidates)}; make one with memfit.plan",
            smallest_bytes=min(each.peak_bytes for each in candidates),
        )
    _, best = max(fitting, key=lambda pair: (pair[0], -pair[1].slowdown))
    return read_plan(own_folder(), best)


def _candidates(model: str, batch_size: int | None, device: str | None) -> list[Entry]:
    every = entries()
    named = [each for each in every if each.model == model]
    if not named:
        known = sorted({each.model for each in every})
        raise InvalidInput(f"the zoo has no {model!r}{suggestion(model, known)}; it has {', '.join(known)}")
    wanted = None if device is None else "cpu" if device.lower() == "cpu" else find_device(device).name
    matching = [
        each
        for each in named
        if (batch_size is None or each.batch_size == batch_size) and (wanted is None or each.device == wanted)
    ]
    if not matching:
        batch = "" if batch_size is None else f" at batch size {batch_size}"
        place = "" if wanted is None else f" on {wanted}"
        raise InvalidInput(f"the zoo has no plan of {model}{batch}{place}; there are {_listed(named)}")
    return matching


def _listed(found: Iterable[Entry]) -> str:
    return ", ".join(f"{each.name} ({format_bytes(each.peak_bytes)})" for each in found)


def read_index(folder: Traversable) -> tuple[Entry, ...]:
    """The list of plans in a folder; none if there is no list."""
    index = folder / INDEX
    if not index.is_file():
        return ()
    try:
        content: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {content['format']!r} of version {content['version']!r}")
        return tuple(Entry.from_dict(each) for each in content["plans"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidFile(
            f"the list of the zoo's plans cannot be read: {type(error).__name__}: {first_line(error)}; install again"
        ) from None


def read_plan(folder: Traversable, entry: Entry) -> Plan:
    """Open the plan of an entry; a damaged one is refused."""
    return Plan.from_json(_read(folder / f"{entry.name}{_PLAN}"))


def read_sizes(folder: Traversable, entry: Entry) -> Sizes:
    """What was measured of the step of an entry."""
    return Sizes.from_json(_read(folder / f"{entry.step_name}{_SIZES}"))


def has_sizes(folder: Traversable, step_name: str) -> bool:
    """Whether what was measured of a step is stored."""
    return (folder / f"{step_name}{_SIZES}").is_file()


def write_plan(folder: Path, name: str, plan: Plan) -> None:
    """Store a plan; the same plan gives the same bytes."""
    _write(folder / f"{name}{_PLAN}", plan.to_json())


def write_sizes(folder: Path, step_name: str, sizes: Sizes) -> None:
    """Store what was measured of a step."""
    _write(folder / f"{step_name}{_SIZES}", sizes.to_json())


def _read(file: Traversable) -> str:
    try:
        return gzip.decompress(file.read_bytes()).decode("utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidFile(f"the zoo's {file.name} cannot be read: {first_line(error)}; install again") from None


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(gzip.compress(text.encode("utf-8"), mtime=0))


def write_index(folder: Path, listed: Sequence[Entry]) -> None:
    """Write the list of plans."""
    content = {"format": FORMAT, "version": VERSION, "plans": [dataclasses.asdict(each) for each in listed]}
    write_atomically(folder / INDEX, json.dumps(content, indent=1) + "\n")
