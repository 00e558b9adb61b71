"""Where compiled kernels are kept, looked at before torch does.

torch makes the directory that `TORCHINDUCTOR_CACHE_DIR` names when its compiler is imported, which fails where
that cannot be done. memfit imports parts of it in any case, and must not fail for a cache that nobody may need.
"""

import logging
import os
import tempfile

log = logging.getLogger(__name__)

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_another_if_needed() -> None:
    """Keep kernels for this process alone where the directory that was asked for cannot be made."""
    asked = os.environ.get(_VARIABLE)
    if not asked:
        return
    try:
        os.makedirs(asked, exist_ok=True)
    except OSError as error:
        os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="memfit-kernels-")
        log.warning(
            "%s cannot be made (%s); compiled kernels are kept in %s instead",
            asked,
            error.strerror,
            os.environ[_VARIABLE],
        )


use_another_if_needed()
