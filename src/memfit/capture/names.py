"""Note values that code names: globals, closures, and what modules, classes and objects behind those names hold."""

import contextlib
import dis
import gc
import os
import types
from collections.abc import Iterable, Mapping
from typing import Any

from memfit.capture.held import Cell, generator_state, is_foreign, is_generator, is_object, is_own_class, is_plain
from memfit.capture.notes import Notes

ENVIRONMENT = "os.environ"
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]

Code = tuple[types.CodeType, dict[str, Any]]  # with its globals


class Names:
    """Looks at code, and at all code that it names."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._seen: set[types.CodeType] = set()

    def note_classes(self, classes: Iterable[type]) -> None:
        """Note what classes of the user's hold, and what their methods name."""
        self.note([each for cls in classes for each in self._methods_of(cls)])

    def note(self, waiting: list[Code]) -> None:
        """Note what code names."""
        while waiting:
            code, around = waiting.pop()
            if code in self._seen or is_foreign(code.co_filename):
                continue
            self._seen.add(code)
            waiting += [(each, around) for each in code.co_consts if isinstance(each, types.CodeType)]
            for name in code.co_names:
                if name in around:
                    waiting += self._note_global(code, around, name)
            if set(code.co_freevars) - {"__class__"}:
                self._note_closures(code)

    def _note_global(self, code: types.CodeType, around: dict[str, Any], name: str) -> list[Code]:
        """Note a global, and what the code may read of it; return the code to be looked at in its turn."""
        value = around[name]
        if isinstance(value, types.FunctionType):
            self._notes.note(name, around, name, value)
            self._notes.note_all(name, value.__dict__)
            return [(value.__code__, value.__globals__)]
        if isinstance(value, type):
            return self._methods_of(value) if is_own_class(value) else []
        if is_generator(value):
            self._notes.generators.append((name, value, generator_state(value)))
        elif isinstance(value, types.ModuleType):
            self._note_module(code, name, value)
        else:
            self._note_value(name, around, name, value)
        return []

    def _note_value(self, path: str, home: Any, name: str, value: Any) -> None:
        if is_plain(value):
            self._notes.note(path, home, name, value)
        elif is_object(value):
            self._notes.note_object(path, value)

    def _note_module(self, code: types.CodeType, name: str, module: types.ModuleType) -> None:
        """Note what code may read of a module."""
        if module is os and {"environ", "getenv"} & {*code.co_names}:
            self._notes.look_into(ENVIRONMENT, vars(os.environ)["_data"])
        home = module.__dict__
        for each in set(code.co_names) & home.keys():
            if callable(home[each]):
                self._notes.note(f"{name}.{each}", home, each, home[each])
            else:
                self._note_value(f"{name}.{each}", home, each, home[each])

    def _note_closures(self, code: types.CodeType) -> None:
        for function in gc.get_referrers(code):
            if not isinstance(function, types.FunctionType) or function.__code__ is not code:
                continue
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # an empty cell
                    self._note_value(f"{code.co_name}.{name}", Cell(cell), name, cell.cell_contents)

    def _methods_of(self, cls: type) -> list[Code]:
        """Note what a class holds, and return the code of its methods."""
        home = cls.__dict__
        methods: list[Code] = []
        for name, value in home.items():
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                methods.append((function.__code__, function.__globals__))
                self._notes.note(f"{cls.__name__}.{name}", home, name, value)
            elif is_plain(value) and not name.startswith("__"):
                self._notes.note(f"{cls.__name__}.{name}", home, name, value)
        return methods


def check_no_writes(code: types.CodeType, around: Mapping[str, Any]) -> None:
    """Refuse code that writes globals, or names functions that do."""
    named = [around.get(name) for name in code.co_names]
    called = [each.__code__ for each in named if isinstance(each, types.FunctionType)]
    for each in (code, *called):
        if _STORE_GLOBAL in each.co_code[::2] and not is_foreign(each.co_filename):
            raise ValueError(f"{each.co_name} writes a global, which a captured call would not do again")
