"""Values that a trace has read, compared with what is there."""

import math

import pytest

from memfit.capture.guards import Guards, Place


def of(value: object) -> tuple[Guards, dict[str, object]]:
    home = {"beta": value}
    return Guards([Place("model.beta", home, "beta", value)], []), home


@pytest.mark.parametrize("now", [0.1 + 0.2, True, 1, "0.3", None, math.nan])
def test_another_value_is_seen_and_named(now: object) -> None:
    guards, home = of(1.0)
    assert guards.hold()
    home["beta"] = now
    assert not guards.hold()
    assert guards.change() == f"model.beta was 1.0 and is {now!r}"


def test_zeros_of_two_signs_differ_and_equal_numbers_do_not() -> None:
    guards, home = of(0.0)
    home["beta"] = -0.0
    assert not guards.hold()
    guards, home = of(1e300)
    home["beta"] = float("1e300")
    assert guards.hold()
    assert guards.change() == ""


def test_what_is_gone_has_changed() -> None:
    guards, home = of(1.0)
    del home["beta"]
    assert not guards.hold()
    assert "model.beta was 1.0" in guards.change()


def test_containers_are_compared_by_what_is_in_them() -> None:
    empty: list[int] = []
    filled = {"a": 1.0}
    guards = Guards([], [("hooks", empty, ()), ("settings", filled, ("a", 1.0))])
    assert guards.hold()
    filled["a"] = 2.0
    assert not guards.hold()
    assert guards.change() == "what is in settings has changed"
    filled["a"] = 1.0
    empty.append(3)
    assert not guards.hold()
    assert guards.change() == "hooks was empty and has 1 elements"
