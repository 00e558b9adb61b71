"""What a forward may leave behind, so that a trace of it can be undone."""

import random
import sys
from typing import Any

from torch import nn

from memfit.capture.guards import elements_of

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Snapshot:
    """The attributes of all modules (counters, lists, cached masks) and Python's generators, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(module, dict(module.__dict__)) for module in model.modules()]
        self._contents = [
            (name, value, value.copy())
            for _, attributes in self._attributes
            for name, value in attributes.items()
            if isinstance(value, list | dict | set)
        ]
        self._generators = _generator_states()

    def restore(self) -> None:
        """Put everything back, also parameters, buffers and submodules."""
        self._restore(registries=True)

    def restore_attributes(self) -> None:
        """Put back all but what a trace itself has put in the place of parameters and buffers."""
        self._restore(registries=False)

    def contents(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Return what is in the attributes of modules and in the containers among them, registries aside."""
        attributes = [(name, (value,)) for module, _ in self._attributes for name, value in module.__dict__.items()]
        contents = [(name, elements_of(container)) for name, container, _ in self._contents]
        return [each for each in (*attributes, *contents) if each[0] not in _REGISTRIES]

    def drawn(self) -> tuple[str, ...]:
        """The names of Python's generators that were drawn from."""
        now = _generator_states()
        return tuple(name for name, state in self._generators.items() if str(now[name]) != str(state))

    def _restore(self, *, registries: bool) -> None:
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for name, container, content in self._contents:
            if registries or name not in _REGISTRIES:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        random.setstate(self._generators[_PYTHON])
        if _NUMPY in self._generators:
            sys.modules["numpy"].random.set_state(self._generators[_NUMPY])


_PYTHON, _NUMPY = "Python's generator", "NumPy's generator"


def _generator_states() -> dict[str, Any]:
    states: dict[str, Any] = {_PYTHON: random.getstate()}
    if "numpy" in sys.modules:
        states[_NUMPY] = sys.modules["numpy"].random.get_state(legacy=True)
    return states
