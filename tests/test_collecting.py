import gc

import pytest

from memfit.collecting import collected_later


def test_nothing_is_collected_meanwhile_and_afterwards_again() -> None:
    with collected_later():
        with collected_later():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_leaves_it_as_it_was() -> None:
    with pytest.raises(ValueError, match="inside"), collected_later():
        raise ValueError("inside")
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collected_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
