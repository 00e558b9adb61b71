"""Note values that code names: globals, closures, and what modules, classes and objects behind those names hold."""

import builtins
import contextlib
import contextvars
import dis
import functools
import gc
import inspect
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from memfit.capture.held import (
    Cell,
    Membership,
    generator_state,
    is_collected,
    is_foreign,
    is_generator,
    is_object,
    is_own_class,
    is_plain,
)
from memfit.capture.notes import Notes

ENVIRONMENT = "os.environ"
_CLOCKS = {
    "time": {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time"},
    "datetime": {"datetime.now", "datetime.today", "datetime.utcnow", "date.today"},
    "uuid": {"uuid1", "uuid4"},
    "secrets": {"token_bytes", "token_hex", "randbelow"},
    "posix": {"urandom"},
}
_LOOKS_AROUND = {
    "builtins": {"globals", "eval", "exec", "input"},
    "inspect": {"stack", "currentframe", "trace"},
    "sys": {"_getframe", "getrecursionlimit"},
    "threading": {"current_thread", "get_ident"},
    "_thread": {"get_ident"},
    "traceback": {"extract_stack", "format_stack", "print_stack"},
    "genericpath": {"exists", "isfile", "isdir", "getsize", "getmtime"},
    "posix": {"listdir", "stat", "scandir", "getcwd"},
}
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]

Code = tuple[types.CodeType, dict[str, Any]]  # with its globals


class Names:
    """Looks at code, and at all code that it names."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._seen: dict[types.CodeType, dict[str, Any]] = {}  # with its globals
        self._classes: list[type] = []  # that were found in closures, to be looked at

    def note_classes(self, classes: Iterable[type]) -> None:
        """Note what classes of the user's hold, and what their methods name."""
        self._note_names([each for cls in classes for each in self._methods_of(cls)])

    def note_values_of(self, cls: type) -> None:
        """Note what a class of the user's holds beside methods."""
        for name, value in [*vars(cls).items()]:
            if not name.startswith("__"):
                self._note_value(f"{cls.__name__}.{name}", vars(cls), name, value)

    def seen(self) -> list[Code]:
        """Return the code that was looked at."""
        return list(self._seen.items())

    def named_by(self, codes: Mapping[types.CodeType, dict[str, Any]]) -> dict[types.CodeType, dict[str, Any]]:
        """Return code with its globals, and that of the functions and methods that it names."""
        methods = {each.co_name: (each, around) for each, around in self._seen.items()}
        found = {**codes}
        for code, around in codes.items():
            named = [around.get(name) for name in code.co_names]
            found |= {each.__code__: each.__globals__ for each in named if isinstance(each, types.FunctionType)}
            found |= dict(methods[name] for name in code.co_names if name in methods)
        return found

    def may_draw(self, codes: Mapping[types.CodeType, dict[str, Any]]) -> bool:
        """Return whether code, or what it may call, names a generator of Python's or NumPy's."""
        found: dict[types.CodeType, dict[str, Any]] = {}
        more = {**self._seen, **codes}
        while len(more) > len(found):
            found, more = more, self.named_by(more)
        return any(_names_generator(code, around) for code, around in found.items())

    def note(self, waiting: list[Code]) -> None:
        """Note what code names, and what functions of it have closed over."""
        closed = dict.fromkeys(code for code, _ in waiting if set(code.co_freevars) - {"__class__"})
        self._note_names(waiting)
        self._note_closures([code for code in closed if code not in self._notes.closed and not _is_foreign_code(code)])
        while self._classes:
            self._note_names(self._methods_of(self._classes.pop()))

    def _note_names(self, waiting: list[Code]) -> None:
        while waiting:
            code, around = waiting.pop()
            if code in self._seen or is_foreign(code.co_filename):
                continue
            self._seen[code] = around
            waiting += [(each, around) for each in code.co_consts if isinstance(each, types.CodeType)]
            for name in code.co_names:
                if name in around:
                    waiting += self._note_global(code, around, name)
            for name in _imported_by(code):
                self._note_module(code, name, sys.modules[name])

    def _note_global(self, code: types.CodeType, around: dict[str, Any], name: str) -> list[Code]:
        """Note a global, and what the code may read of it; return the code to be looked at in its turn."""
        value = around[name]
        function = inspect.unwrap(value) if callable(value) else value  # what is behind a cache
        if isinstance(function, types.FunctionType):
            self._notes.note(name, around, name, value)
            self._notes.note_all(name, function.__dict__)
            self._notes.note_function(name, function)
            return [(function.__code__, function.__globals__)]
        if isinstance(value, type):
            return self._methods_of(value) if is_own_class(value) else []
        if is_generator(value):
            self._notes.generators.append((name, value, generator_state(value)))
        elif isinstance(value, types.ModuleType):
            self._note_module(code, name, value)
        elif isinstance(value, contextvars.ContextVar | functools.partial | types.MethodType | nn.Module):
            self._notes.look_into(name, value)
        else:
            self._note_value(name, around, name, value)
        return []

    def _note_value(self, path: str, home: Any, name: str, value: Any) -> None:
        if is_plain(value) or is_collected(value):
            self._notes.note(path, home, name, value)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._notes.look_into(path, value)
        elif isinstance(value, type) and is_own_class(value):
            self._classes.append(value)
        elif is_object(value):
            self._notes.note_object(path, value)

    def _note_module(self, code: types.CodeType, name: str, module: types.ModuleType, depth: int = 2) -> None:
        """Note what code may read of a module, and of modules in it (`nn.functional.gelu`)."""
        if module is os and {"environ", "getenv"} & {*code.co_names}:
            self._notes.look_into(ENVIRONMENT, vars(os.environ)["_data"])
        home = module.__dict__
        if module is sys and "modules" in code.co_names:
            modules: Any = Membership(sys.modules)
            for each in code.co_consts:
                if isinstance(each, str):
                    self._notes.note(f"{each!r} in sys.modules", modules, each, each in sys.modules)
        for each in set(code.co_names) & home.keys():
            path, value = f"{name}.{each}", home[each]
            if callable(value):
                self._notes.note(path, home, each, value)
            elif isinstance(value, types.ModuleType):
                if depth > 1:
                    self._note_module(code, path, value, depth - 1)
            else:
                self._note_value(path, home, each, value)

    def _note_closures(self, codes: list[types.CodeType]) -> None:
        """Note the variables that functions of some code have closed over."""
        wanted = {id(code) for code in codes}
        for function in gc.get_referrers(*codes) if codes else ():  # walks all objects there are, so once
            if not isinstance(function, types.FunctionType) or id(function.__code__) not in wanted:
                continue
            code = function.__code__
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
                if function.__closure__:
                    self._notes.look_into(f"{cls.__name__}.{name}", function)
                self._notes.note(f"{cls.__name__}.{name}", home, name, value)
                self._notes.note_defaults(f"{cls.__name__}.{name}", function)
            elif is_plain(value) and not name.startswith("__"):
                self._notes.note(f"{cls.__name__}.{name}", home, name, value)
            elif is_object(value):
                self._notes.note_object(f"{cls.__name__}.{name}", value)
                if hasattr(type(value), "__get__") and is_own_class(type(value)):
                    self._classes.append(type(value))
        return methods


def _imported_by(code: types.CodeType) -> list[str]:
    """Return the modules that code imports by itself, and that are there."""
    if _IMPORT_NAME not in code.co_code[::2]:
        return []
    found = [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    return [name for name in found if name in sys.modules and not is_foreign(_file_of(sys.modules[name]))]


def _is_foreign_code(code: types.CodeType) -> bool:
    return is_foreign(code.co_filename)


def _file_of(module: types.ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def check_same_in_every_call(code: types.CodeType, around: Mapping[str, Any]) -> None:
    """Refuse code that names iterators, or functions that answer otherwise whenever they are called."""
    for path, _, value in named_by(code, around):
        if hasattr(type(value), "__next__"):
            raise ValueError(f"the forward reads {path}, an iterator, which a captured call would not move on")
        if _is_among(_CLOCKS, value):
            raise ValueError(f"the forward calls {path}, whose answer a captured call would give again and again")
        if _is_among(_LOOKS_AROUND, value):
            raise ValueError(f"the forward calls {path}, and what that sees is not seen by a captured call")


def _names_generator(code: types.CodeType, around: Mapping[str, Any]) -> bool:
    """Return whether code names Python's or NumPy's own generator, or a function that draws from one."""
    named = (value for _, _, value in named_by(code, around))
    return any(is_generator(each) or is_generator(getattr(each, "__self__", None)) for each in named)


def _is_among(functions: Mapping[str, set[str]], value: Any) -> bool:
    """Return whether a value is one of the functions that are named by module."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return False
    owner = getattr(value, "__self__", None)
    named = functions.get((owner.__module__ if isinstance(owner, type) else value.__module__) or "", ())
    return value.__qualname__ in named or value.__name__ in named


def named_by(code: types.CodeType, around: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the globals that code reads, and what it reads of modules and classes among them: path, owner, value."""
    path, value = "", None
    owner: Any = None
    for each in dis.get_instructions(code):
        name = str(each.argval)
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and (name in around or hasattr(builtins, name)):
            path, owner = name, None
            value = around[name] if name in around else getattr(builtins, name)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and path and hasattr(value, name):
            path, owner, value = f"{path}.{name}", value, getattr(value, name)
        else:
            path = path if each.opname in ("PRECALL", "PUSH_NULL", "CACHE") else ""
            continue
        yield path, owner, value
        if not isinstance(value, types.ModuleType | type):
            path = ""


def check_no_writes(code: types.CodeType, around: Mapping[str, Any]) -> None:
    """Refuse code that writes globals, or names functions that do."""
    named = [around.get(name) for name in code.co_names]
    called = [each.__code__ for each in named if isinstance(each, types.FunctionType)]
    for each in (code, *called):
        if _STORE_GLOBAL in each.co_code[::2] and not is_foreign(each.co_filename):
            raise ValueError(f"{each.co_name} writes a global, which a captured call would not do again")
