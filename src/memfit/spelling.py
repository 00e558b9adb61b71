"""What may have been meant by a name that is not known."""

import difflib
from collections.abc import Iterable


def spelling_advice(name: str, known: Iterable[str]) -> str:
    """What may have been meant, in whatever case it was written.

    >>> spelling_advice("resnet5", ["resnet50", "vgg16"])
    'did you mean resnet50?'
    """
    near = nearest_names(name, known)
    return f"did you mean {' or '.join(near)}?" if near else "check the spelling"


def suggestion(name: str, known: Iterable[str]) -> str:
    """What may have been meant, to stand after a name that is not known; nothing if nothing is near.

    >>> suggestion("adamwx", ["adamw", "sgd"]), suggestion("x", ["adamw"])
    (' (did you mean adamw?)', '')
    """
    near = nearest_names(name, known)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names that look like this one, the nearest first."""
    by_plain_name = {each.casefold(): each for each in known}
    return [by_plain_name[each] for each in difflib.get_close_matches(name.casefold(), by_plain_name, n=3)]
