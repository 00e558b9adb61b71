"""What a forward may not do while it is traced."""

import builtins
import threading
from collections.abc import Callable

import pytest
import torch

from memfit.capture.refusals import refusing


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
