"""Compare a run of the user's own loop with memfit and without."""

import contextlib
import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memfit.capture.outputs import key_name
from memfit.capture.snapshot import Snapshot
from memfit.capture.spilled import SpillFile, StoredTensor
from memfit.errors import InvalidInput
from memfit.execute.attach import planned_forwards, removed
from memfit.progress import ProgressLike, progress_line
from memfit.prove.comparison import Comparison, compared_part

Train = Callable[[nn.Module], Iterable[Any]]
_Parts = dict[str, dict[str, StoredTensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCheck:
    """The outcome of comparing a fitted model's run with the plain one."""

    model: str
    steps: int
    comparisons: tuple[Comparison, ...]  # losses by step, then what there is after the last one

    @property
    def exact(self) -> bool:
        """Return whether everything is equal bit for bit."""
        return all(each.equal == each.compared for each in self.comparisons)

    def __str__(self) -> str:
        verdict = "equal bit for bit" if self.exact else "DIFFERENT"
        lines = [f"{self.model}, {self.steps} steps of its loop with and without memfit: {verdict}"]
        for each in self.comparisons:
            where = "" if each.equal == each.compared else f", largest {each.largest_difference:.1e} in {each.worst}"
            lines.append(f"  {each.part}: {each.equal} of {each.compared} equal{where}")
        return "\n".join(lines)


def check_run(
    model: nn.Module, train: Train, *, steps: int = 10, seed: int = 0, progress: ProgressLike = None
) -> RunCheck:
    """Run a loop with the plain model and again with the fitted one, and compare; the model stays as it is.

    `train(model)` is the loop as a generator: it yields after every step, the loss alone or together with the
    optimizer, in a tuple. Both runs begin with the model as it is now and with generators seeded alike. Losses are
    compared step by step; parameters, gradients (None as None), buffers, the state of the optimizers and generators
    after the last one. The plain run needs the memory that it needs without memfit.
    """
    if not planned_forwards(model):
        raise InvalidInput(f"this {type(model).__name__} does not run through memfit; call memfit.fit first")
    with (
        SpillFile() as file,
        _put_back(model, file),
        progress_line(progress, "running the loop without memfit") as line,
    ):
        with removed(model), _put_back(model, file):
            plain = _ran(model, train, steps, seed, file)
        line.doing("running the loop with memfit")
        planned = _ran(model, train, steps, seed, file)
        comparisons = tuple(compared_part(part, plain[part], planned[part]) for part in plain)
    return RunCheck(model=type(model).__name__, steps=len(plain["losses"]), comparisons=comparisons)


def _ran(model: nn.Module, train: Train, steps: int, seed: int, file: SpillFile) -> _Parts:
    """Everything a run makes."""
    model.zero_grad(set_to_none=True)
    _seed(seed)
    losses: dict[str, torch.Tensor] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    for number, yielded in enumerate(itertools.islice(train(model), steps)):
        leaves = pytree.tree_leaves(yielded)
        optimizers |= {id(each): each for each in leaves if isinstance(each, torch.optim.Optimizer)}
        numbers = [each for each in leaves if isinstance(each, torch.Tensor | float)]
        losses |= {
            f"step {number}" + (f", {place}" if place else ""): torch.as_tensor(each).detach().clone()
            for place, each in enumerate(numbers)
        }
    if not losses:
        raise InvalidInput("the loop yields no loss; yield it after every step: yield loss, optimizer")
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    states = {
        f"{place}{''.join(f'.{key_name(key)}' for key in path)}": leaf
        for place, optimizer in enumerate(optimizers.values())
        for path, leaf in pytree.tree_flatten_with_path(optimizer.state_dict()["state"])[0]
        if isinstance(leaf, torch.Tensor)
    }
    made: Mapping[str, Mapping[str, torch.Tensor]] = {
        "losses": losses,
        "parameters": dict(model.named_parameters()),
        "gradients": gradients,
        "buffers": dict(model.named_buffers()),
        "optimizers": states,
        "generator": {"torch": torch.get_rng_state()},
    }
    return {part: {name: file.store(each.detach()) for name, each in tensors.items()} for part, tensors in made.items()}


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _load(model: nn.Module, states: Mapping[str, StoredTensor]) -> None:
    with torch.no_grad():
        for name, state in model.state_dict().items():
            state.copy_(states[name].read())


@contextlib.contextmanager
def _put_back(model: nn.Module, file: SpillFile) -> Iterator[None]:
    """Leave parameters, buffers, gradients, attributes and generators as they are now."""
    states = {name: file.store(state) for name, state in model.state_dict().items()}
    gradients = [(each, each.grad) for each in model.parameters()]
    snapshot, generator = Snapshot(model), torch.get_rng_state()
    try:
        yield
    finally:
        snapshot.restore()
        _load(model, states)
        torch.set_rng_state(generator)
        for parameter, gradient in gradients:
            parameter.grad = gradient
