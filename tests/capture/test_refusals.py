"""What a forward may not do while it is traced."""

import builtins
import logging
import os.path
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memfit.capture.refusals import check_no_attributes, refusing


def register(tensor: torch.Tensor) -> None:
    tensor.register_post_accumulate_grad_hook(lambda parameter: None)


def fork(tensor: torch.Tensor) -> None:
    with torch.random.fork_rng():
        torch.rand(1)


def assign(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(3)


@pytest.mark.parametrize(
    ("act", "deed"),
    [
        (lambda tensor: print(tensor.shape), "prints"),
        (lambda _: os.path.exists("here"), "looks at files"),
        (lambda _: Path("here").is_file(), "looks at files"),
        (lambda tensor: tensor.grad, "reads .grad"),
        (assign, "puts another tensor into .data"),
        (lambda tensor: (tensor * 2).retain_grad(), "calls retain_grad"),
        (register, "registers a hook"),
        (fork, "sets the state of torch's generator"),
        (lambda tensor: torch.set_rng_state(torch.get_rng_state()), "sets the state of torch's generator"),
    ],
)
def test_it_is_refused_with_what_it_is(act: Callable[[torch.Tensor], object], deed: str) -> None:
    tensor = torch.ones(3, requires_grad=True)
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"the forward {deed}"), refusing(again=False):
        act(tensor)
    torch.set_rng_state(generator)
    act(tensor)  # and allowed again


def test_other_threads_print() -> None:
    with refusing(again=False):
        thread = threading.Thread(target=print, args=("of another thread",))
        thread.start()
        thread.join()
    assert builtins.print is print


def test_lines_are_refused_from_the_second_trace_on() -> None:
    with refusing(again=False):
        logging.getLogger(__name__).error("once")
    with pytest.raises(ValueError, match=r"the forward logs a line \(.*test_refusals.py:"), refusing(again=True):
        logging.getLogger(__name__).error("again")


def test_hooks_and_functions_that_ask_for_none_are_noted() -> None:
    tensor = torch.ones(3, requires_grad=True)

    class AsksForNone(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            ctx.set_materialize_grads(False)
            return given * 2

    with refusing(again=False) as seen:
        tensor.register_hook(repr)
        assert not seen.asking_for_none
        AsksForNone.apply(tensor)
    assert seen.hooks == [repr]
    assert len(seen.asking_for_none) == 1


def test_attributes_on_outputs_are_refused() -> None:
    output = torch.ones(3)
    check_no_attributes([output], "it returns")
    output.mark = 1
    with pytest.raises(ValueError, match="puts the attribute 'mark' on a tensor that it returns"):
        check_no_attributes([output], "it returns")


def test_labels_for_profiles_are_said_not_to_be_set() -> None:
    with (
        refusing(again=False),
        pytest.warns(UserWarning, match="sets the label 'mine'"),
        torch.profiler.record_function("mine"),
    ):
        pass
