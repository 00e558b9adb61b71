"""What the tests of the command line share."""

from collections.abc import Iterator

import pytest
from budgeted import one_thread


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield
