"""How objects show themselves in a notebook, without knowing how they look.

A class has `_repr_html_` and asks here; `memfit.report`, which stands above it, registers what it draws. Where nothing
is registered the answer is None, and a notebook shows the plain text.
"""

import functools


@functools.singledispatch
def html_of(shown: object) -> str | None:  # noqa: ARG001  (what is registered for its type looks at it)
    """An object as a fragment of HTML, or None."""
    return None
