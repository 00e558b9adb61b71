"""Unpickle lists, tuples, dicts, texts and numbers, and nothing else.

Note [Nothing is executed]
    A pickle is a program. What makes one dangerous is naming a class or a function: every such name goes through
    `find_class`, which refuses all of them, by name. What is left builds containers.
"""

import io
import pickle
from typing import Any, NoReturn

from memfit.errors import InvalidFile, first_line

_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OverflowError, MemoryError, UnicodeDecodeError, RecursionError),
)


class _ForeignClass(Exception):
    """A pickle names a class or a function."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise _ForeignClass(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _ForeignClass("an object kept outside of the file")


def load_plain(content: bytes) -> Any:
    """Read a pickle of plain containers; refuse every other by the name of what it wants."""
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except _ForeignClass as error:
        raise InvalidFile(
            f"the pickle names {first_line(error)}, and a memory snapshot holds plain lists and dicts alone; "
            "nothing of it was loaded"
        ) from None
    except _DAMAGE as error:
        reason = first_line(error) or type(error).__name__
        raise InvalidFile(f"the pickle is damaged or cut off ({reason}); dump the snapshot again") from None
