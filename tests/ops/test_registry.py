import pytest
import torch

from memfit.measure import signature
from memfit.ops.bits import pack
from memfit.ops.registry import LEAN_OPERATORS, chosen, find_function, name_of


def test_every_function_is_found_by_its_name() -> None:
    for operator in LEAN_OPERATORS:
        for function in operator.functions:
            assert find_function(name_of(function)) is function


def test_names_say_where_a_function_is() -> None:
    assert name_of(pack) == "memfit.ops.bits:pack"
    assert name_of(torch.ops.aten.relu.default) == "aten.relu.default"


@pytest.mark.parametrize("name", ["os:system", "memfit.ops.bits:spread", "memfit.ops.bits", "", "builtins:eval"])
def test_no_other_function_can_be_named(name: str) -> None:
    assert find_function(name) is None
    with pytest.raises((ValueError, AttributeError)):
        signature.find_operator(name)


def test_techniques_switch_on_their_operators() -> None:
    of_backward = {"batch_norm_backward", "convolution_backward", "tied_embedding"}
    kept = {"bits", "dropout", "relu", "max_pool", "batch_norm"}
    assert {operator.name for operator in chosen(["lean"])} == kept | of_backward
    assert [operator.name for operator in chosen(("8-bit", "recompute"))] == ["8-bit"]
    assert chosen(()) == ()


def test_what_lean_and_offload_switch_on_is_exact_and_nothing_else_is() -> None:
    assert all(operator.exact == (operator.technique in {"lean", "offload"}) for operator in LEAN_OPERATORS)


def test_operators_have_names_of_their_own() -> None:
    names = [operator.name for operator in LEAN_OPERATORS]
    assert len(set(names)) == len(names)


def test_a_call_of_a_function_comes_back_from_its_signature() -> None:
    text = signature.encode(pack, (torch.ones(3, 5),), {})
    function, args, _ = signature.decode(text)
    assert function is pack
    assert function(*args).tolist() == [255, 127]
