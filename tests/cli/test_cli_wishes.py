import pytest
from command_line import folder_with_net
from torch import nn

from memfit.cli.wishes import Wishes, parse_allow, parse_budget, parse_selection
from memfit.errors import InvalidBudget, InvalidInput
from memfit.recipe import EXACT, TECHNIQUES

PLAIN = {
    "optimizer": "adamw",
    "allow": None,
    "recompute": None,
    "keep": None,
    "outputs": "all",
    "device": None,
    "time_limit": 10.0,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.5", 0.5), ("1", 1.0), ("6GiB", "6GiB"), (" 6 GB ", "6 GB"), ("smallest", "smallest"), ("5e6", 5e6)],
)
def test_budgets(text, expected):
    assert parse_budget(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-0.5", "nan", "inf", "-1GiB", "half", "6 parsecs", "50%"])
def test_what_is_no_budget(text):
    with pytest.raises(InvalidBudget):
        parse_budget(text)


def test_techniques_are_separated_by_commas():
    assert parse_allow(None) == EXACT
    assert parse_allow("lean") == ("lean",)
    assert parse_allow(" recompute , lean,lean,") == ("recompute", "lean")
    assert parse_allow(",".join(TECHNIQUES)) == tuple(TECHNIQUES)


@pytest.mark.parametrize("text", ["", ",", "Lean", "magic", "recompute lean"])
def test_what_is_no_technique(text):
    with pytest.raises(InvalidInput, match="known are 'recompute'"):
        parse_allow(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", 2),
        ("nn.ReLU", nn.ReLU),
        ("torch.nn.LayerNorm", nn.LayerNorm),
        ("encoder.layer.*.attention", "encoder.layer.*.attention"),
        ("cnn.ReLU", "cnn.ReLU"),
    ],
)
def test_selections(text, expected):
    assert parse_selection(text) == expected


def test_a_type_of_a_file_or_package():
    assert parse_selection("torch.nn:Linear") is nn.Linear
    assert parse_selection("./net.py:Net").__name__ == "Net"


@pytest.mark.parametrize("text", ["", " ", "nn.NoSuch", "nn.functional", "./net.py:make_model", "os:system"])
def test_what_selects_nothing(text):
    with pytest.raises(InvalidInput):
        parse_selection(text)


def test_a_budget_comes_from_the_option_the_device_or_the_hand():
    assert Wishes.of(**PLAIN).budget("0.5") == 0.5
    on_device = Wishes.of(**PLAIN | {"device": "a100-40gb"})
    assert on_device.budget(None) == pytest.approx(39.4 * 2**30, rel=0.01)
    assert on_device.budget("0.5") == 0.5
    assert Wishes.of(**PLAIN | {"recompute": ["nn.ReLU"]}).budget(None) is None
    with pytest.raises(InvalidInput, match="there is no budget"):
        Wishes.of(**PLAIN).budget(None)


def test_no_optimizer_is_none():
    assert Wishes.of(**PLAIN | {"optimizer": "None"}).keywords()["optimizer"] is None
