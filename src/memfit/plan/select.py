"""Manual control: which values a user means by module types, name patterns and segment lengths.

Note [What is inside a module]
    `nn.LayerNorm` or `"encoder.*.norm"` names a module without parts: what it makes. A module with parts
    ("encoder.layer.*") stands for everything made inside it that nothing outside reads; what leaves it is
    not meant, so that recomputing a module starts from what came into it, as `torch.utils.checkpoint` does.
    A number n means the same for runs of n consecutive blocks of the model's longest list of blocks.
"""

import fnmatch
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from memfit.errors import InvalidInput
from memfit.ir import Phase
from memfit.plan.problem import Problem

Selection = type | str | int


def selected_values(problem: Problem, selections: Sequence[Selection], modules: Mapping[str, Any], keyword: str) -> int:
    """The values that are meant; a selection that means nothing is an error."""
    chosen = 0
    for selection in selections:
        groups = _groups(selection, modules)
        values = 0
        for group in groups:
            values |= _made_inside(problem, group, modules)
        if not values:
            raise InvalidInput(
                f"{keyword}={selection!r} matches no value of this model that a plan could decide about; name a module "
                f"type, a pattern of module names or a number of blocks; top-level names: {_top_names(modules)}"
            )
        chosen |= values
    return chosen


def _groups(selection: Selection, modules: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Groups of module paths that are treated as one module each."""
    if isinstance(selection, bool) or not isinstance(selection, type | str | int):
        raise InvalidInput(f"a module type, a name pattern or a number of blocks was expected, {selection!r} was given")
    if isinstance(selection, int):
        if selection < 1:
            raise InvalidInput(f"a segment has at least one block, {selection} was given")
        blocks = _longest_list(modules)
        return [tuple(blocks[start : start + selection]) for start in range(0, len(blocks), selection)]
    if isinstance(selection, type):
        return [(path,) for path, module in modules.items() if path and isinstance(module, selection)]
    return [(path,) for path in modules if path and fnmatch.fnmatchcase(path, selection)]


def _longest_list(modules: Mapping[str, Any]) -> list[str]:
    """The blocks of a model: the longest run of numbered children that have parts of their own."""
    lists: dict[str, list[str]] = defaultdict(list)
    for path in modules:
        parent, _, name = path.rpartition(".")
        if name.isdigit() and any(other.startswith(path + ".") for other in modules):
            lists[parent].append(path)
    return max(lists.values(), key=len, default=[])


def _made_inside(problem: Problem, group: tuple[str, ...], modules: Mapping[str, Any]) -> int:
    graph = problem.graph

    def is_inside(path: str) -> bool:
        return any(path == each or path.startswith(each + ".") for each in group)

    made = read_outside = 0
    for operation in graph.operations:
        if operation.phase is not Phase.FORWARD:
            continue
        if is_inside(operation.module):
            made |= sum(problem.bit.get(storage, 0) for storage in operation.outputs)
        else:
            for storage in operation.inputs:
                read_outside |= problem.bit.get(storage, 0)
    has_parts = len(group) > 1 or any(path.startswith(group[0] + ".") for path in modules)
    return made & ~read_outside if has_parts else made


def _top_names(modules: Mapping[str, Any]) -> str:
    return ", ".join(Counter(path.partition(".")[0] for path in modules if path)) or "none"
