"""Models without weights: everything has a shape, nothing has memory."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from memfit import _torch
from memfit.capture.construction import Construction


class _Mode(_torch.FakeTensorMode):
    """One for all tensors of a block, also of those that modules copy (`nn.TransformerEncoder` copies its layer)."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> "_Mode":
        return self


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build models and samples that take no memory, to estimate what would not fit here.

    >>> import torch, memfit
    >>> with memfit.without_weights():
    ...     model, batch = torch.nn.Linear(500_000, 500_000), torch.empty(8, 500_000)
    >>> memfit.estimate(model, batch).peak_bytes > 2 * 10**12
    True
    """
    with _Mode(allow_non_fake_inputs=True), Construction(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # torch, in copies
        yield
