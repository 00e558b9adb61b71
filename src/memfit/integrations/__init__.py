"""memfit inside the tools people train with. Each of them is imported when it is first used.

`memfit.integrations.transformers`, `.lightning` and `.accelerate` need the package of that name, which is an extra
of this one: `pip install memfit[transformers]`.
"""

import importlib
from types import ModuleType

from memfit.errors import InvalidInput

_TOOLS = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name:
            raise
        raise InvalidInput(
            f"memfit.integrations.{name} needs the package {name}, which is not installed; "
            f'install it with pip install "memfit[{name}]"'
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_TOOLS])
