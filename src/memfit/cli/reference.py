"""What a user names on the command line: `package.module:callable(1, flag=True)`.

Note [Never evaluated]
    The text is parsed, never evaluated: it is a dotted name and, in parentheses, literals.
    The module it names is imported and the callable it names is called, because that is what
    was asked for. Nothing of Python's standard library can be named: it makes no models, but
    it runs commands and deletes files.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from memfit.capture.record import in_library, short_line
from memfit.cli import torchvision_repair
from memfit.errors import InvalidInput, MemfitError
from memfit.spelling import spelling_advice, suggestion

_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FORMS = 'write "package.module:callable", "package.module:callable(1, flag=True)" or "./file.py:callable"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """A callable by name, and the literal arguments to call it with."""

    text: str  # as the user wrote it
    invalid: type[InvalidInput]  # what to raise when it cannot be followed
    origin: str | Path  # the module or the file to import
    names: tuple[str, ...]  # from the module to the callable
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def fail(self, reason: str) -> NoReturn:
        raise self.invalid(f"{self.text!r}: {reason}") from None

    @contextlib.contextmanager
    def explaining(self, doing: str, advice: str) -> Iterator[None]:
        """Turn whatever the user's own code raises into one sentence."""
        try:
            yield
        except MemfitError:
            raise
        except (Exception, SystemExit) as error:
            place = _line_that_failed(error)
            self.fail(f"{doing} failed{place} with {type(error).__name__}: {_first_lines(error)}; {advice}")


def parse(text: str, invalid: type[InvalidInput]) -> Reference:
    """Read a reference without importing anything. See Note [Never evaluated].

    >>> reference = parse("torchvision.models.resnet50(num_classes=10)", InvalidInput)
    >>> reference.origin, reference.names, reference.kwargs
    ('torchvision', ('models', 'resnet50'), {'num_classes': 10})
    """

    def fail(reason: str) -> NoReturn:
        raise invalid(f"{text!r}: {reason}; {_FORMS}") from None

    origin, expression = _split(text.strip(), fail)
    names, call = _names_and_call(expression, fail)
    if origin is None:
        origin, *rest = names
        names = tuple(rest)
        if not names:
            fail(f"this names {origin!r} but no module to find it in")
    hidden = [name for name in names if name.startswith("__")]
    if hidden:
        fail(f"{hidden[0]!r} is an inner name of Python, not something that makes a model or a sample")
    if isinstance(origin, str):
        _refuse_standard_library(origin, fail)
    args, kwargs = ((), {}) if call is None else _literals(call, expression, fail)
    return Reference(text=text, invalid=invalid, origin=origin, names=names, args=args, kwargs=kwargs)


def load(reference: Reference) -> Callable[..., Any]:
    """Import what a reference names and return the callable."""
    torchvision_repair.prepare()
    found: Any = _module(reference)
    for name in reference.names:
        found = _member(reference, found, name)
    if not callable(found):
        reference.fail(f"this is a {type(found).__name__} and cannot be called; name a class or a function")
    _refuse_standard_library(_defining_module(found), reference.fail)
    return found  # type: ignore[no-any-return]  # asked above


Fail = Callable[[str], NoReturn]


def _split(text: str, fail: Fail) -> tuple[str | Path | None, str]:
    """The part before the colon that names a module or a file, and the part after it."""
    path, found_file, expression = text.partition(".py:")
    if found_file and not {'"', "'"} & set(path):
        return Path(path + ".py"), expression.strip()
    if text.endswith(".py"):
        fail("this names a file but no callable in it")
    head, colon, expression = text.partition(":")
    if not colon or "(" in head:
        return None, text
    if not _DOTTED_NAME.fullmatch(head):
        fail(f"{head!r} is not the name of a module")
    return head, expression.strip()


def _names_and_call(expression: str, fail: Fail) -> tuple[tuple[str, ...], ast.Call | None]:
    try:
        node = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        fail(f"{expression!r} cannot be read ({reason})")
    call = node if isinstance(node, ast.Call) else None
    return _dotted(node if call is None else call.func, expression, fail), call


def _dotted(node: ast.expr, expression: str, fail: Fail) -> tuple[str, ...]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        fail(f"a dotted name was expected where {_source(node, expression)!r} was found; it was not run")
    return (node.id, *reversed(names))


def _literals(call: ast.Call, expression: str, fail: Fail) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(_literal(node, expression, fail) for node in call.args)
    kwargs: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            fail(f"the arguments {_source(keyword, expression)!r} are not written out")
        if keyword.arg in kwargs:
            fail(f"the argument {keyword.arg!r} is given twice")
        kwargs[keyword.arg] = _literal(keyword.value, expression, fail)
    return args, kwargs


def _literal(node: ast.expr, expression: str, fail: Fail) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        fail(
            f"the argument {_source(node, expression)!r} is not a literal, and was not run; "
            'arguments can be numbers, "strings", True, False, None, and lists, tuples and dicts of these'
        )


def _source(node: ast.AST, expression: str) -> str:
    return ast.get_source_segment(expression, node) or expression


def _refuse_standard_library(module: str, fail: Fail) -> None:
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        fail(
            f"{package!r} is part of Python's standard library, which makes no models or samples, so it was not "
            f"called; if you mean a file of your own, write ./{package}.py:callable"
        )


def _defining_module(found: Any) -> str:
    while isinstance(found, functools.partial):
        found = found.func
    return getattr(found, "__module__", None) or ""


def _module(reference: Reference) -> ModuleType:
    if isinstance(reference.origin, Path):
        return _module_of_file(reference, reference.origin.expanduser())
    # Last, so that a file that happens to lie here cannot take the place of an installed package.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return _imported(reference, reference.origin)


def _imported(reference: Reference, name: str) -> ModuleType:
    advice = "the module must be importable by itself: try it with python -c"
    with reference.explaining(f"importing {name}", advice):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise
            near = suggestion(error.name, (each.name for each in pkgutil.iter_modules()))
            reference.fail(
                f"there is no module {error.name!r}{near}; install the package, start from the folder it is in, "
                "or name a file such as ./model.py:callable"
            )


def _module_of_file(reference: Reference, path: Path) -> ModuleType:
    if not path.is_file():
        reference.fail(f"there is no file {str(path)!r}; give its path from the current folder, or a full path")
    path = path.resolve()
    name = f"memfit_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as Python does for a script, so that its neighbours are found
    sys.modules[name] = module  # dataclasses and pickle look the module of a class up here
    try:
        with reference.explaining(f"importing {path.name}", "the file must be importable by itself"):
            specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _member(reference: Reference, owner: Any, name: str) -> Any:
    """An attribute, or a submodule that nobody imported yet."""
    owner_name = getattr(owner, "__name__", type(owner).__name__)
    if isinstance(reference.origin, Path):
        owner_name = reference.origin.name
    with reference.explaining(f"looking {name} up in {owner_name}", "the package may be damaged or lack a dependency"):
        try:
            return getattr(owner, name)
        except AttributeError:
            if _is_submodule(owner, name):
                return _imported(reference, f"{owner.__name__}.{name}")
    return reference.fail(f"{owner_name} has no {name!r}; {spelling_advice(name, dir(owner))}")


def _is_submodule(owner: Any, name: str) -> bool:
    if not isinstance(owner, ModuleType) or not hasattr(owner, "__path__"):
        return False
    return importlib.util.find_spec(f"{owner.__name__}.{name}") is not None


def _line_that_failed(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        short_line(frame.filename, frame.lineno or 0)
        for frame in frames
        if not in_library(frame.filename) and not frame.filename.startswith("<")
    ]
    own_only = [line for line in lines if not line.startswith(("importlib/", "memfit/"))]
    return f" at {own_only[-1]}" if own_only else ""


def _first_lines(error: BaseException) -> str:
    """The message as one line, and not a page of it."""
    message = " ".join(str(error).split())
    return message if len(message) <= 300 else message[:297] + "..."
