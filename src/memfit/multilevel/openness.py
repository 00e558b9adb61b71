"""Which problems' parameters require a gradient right now.

A pass keeps activations for every parameter that requires a gradient, wanted or not. So for each pass only
those problems are open that it differentiates; the rest are constants and cost nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.multilevel.problems import Problem


class Openness:
    """Opens problems for a pass and closes the others."""

    def __init__(self, problems: Sequence["Problem"]) -> None:
        self._problems = tuple(problems)
        self._open: frozenset[Problem] | None = None

    def only(self, *problems: "Problem") -> None:
        """Parameters of these problems require a gradient, those of the others do not."""
        wanted = frozenset(problems)
        if wanted == self._open:
            return
        open_parameters = {id(parameter) for problem in wanted for parameter in problem.parameter_list}
        for problem in self._problems:
            for parameter in problem.parameter_list:
                parameter.requires_grad_(id(parameter) in open_parameters)
        self._open = wanted

    def all(self) -> None:
        """As users left them."""
        self.only(*self._problems)
