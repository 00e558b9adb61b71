"""What an optimizer allocates, found by letting it step on tensors without memory."""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from memfit import _torch
from memfit.accelerator import is_accelerator
from memfit.errors import InvalidInput, first_line
from memfit.ir import BlockEvent, OptimizerBlocks, OptimizerMemory
from memfit.measure.live import LARGE_NUMBER, AnsweredQuestions, LiveBytes, NotedAnswers
from memfit.measure.probe import measured_costs
from memfit.optimizer_twin import twin_over
from memfit.spelling import suggestion
from memfit.tensors import local_part, storage_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownMemory:
    """Stands for an optimizer, and what else lives beside the step, whose memory has been found out already."""

    name: str
    memory: OptimizerMemory


class _How(TypedDict):
    """Say how a twin is stepped."""

    for_cuda: bool
    skipped: Collection[int]  # ids of parameters without a gradient
    room_bytes: int | None  # that matrix products are run in
    varies_answers: bool  # see Note [Both branches]


_Source = str | Optimizer | Callable[..., Optimizer]
OptimizerLike = _Source | KnownMemory

_MOST_STEPS = 256  # an optimizer whose state grows longer than that is counted as it is then
_CYCLE_STEPS = 12  # of an optimizer that may do more at every k-th step, and counts them by itself
_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")  # they pack their inputs
_FIRST_GRADIENT = 1e100  # in 64 bits it can be halved hundreds of times before it counts as none
_FACTORS = (-0.95, 0.67)  # of one gradient to the next; steps of a secant method stay about as long
_VARIED_FACTORS = (1.5, 0.5, 1.5, 0.5, 0.5)
_FALL_OF_LOSS = 1e130  # more than any gradient times any step

_BY_NAME: dict[str, Callable[..., Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
_BY_NAME["sgd"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def optimizer_memory(
    optimizer: OptimizerLike,
    parameters: Sequence[nn.Parameter],
    *,
    for_cuda: bool = False,
    without_gradient: Sequence[nn.Parameter] = (),
    room_bytes: int | None = None,
) -> OptimizerMemory:
    """State and workspace of one step of `optimizer` over `parameters`, once the state grows no more.

    `optimizer` is a name in `torch.optim` ("sgd" means with momentum), an instance, or
    anything that makes one from parameters. `for_cuda` counts the step as it runs on CUDA, where
    optimizers that were not told otherwise work on all parameters at once (`foreach`). Parameters
    `without_gradient` are skipped by the step, as those that the loss does not depend on. An optimizer that
    cannot step without a closure gets one. LBFGS is counted with its history full, beside a step that it leaves out
    of it; a long line search may hold a few gradients more. The loss that a closure returns is not counted.
    Matrix products are run to learn what they allocate inside, in `room_bytes` if that is given.
    """
    if isinstance(optimizer, KnownMemory):
        return optimizer.memory
    skipped = {id(parameter) for parameter in without_gradient}
    how: _How = {"for_cuda": for_cuda, "skipped": skipped, "room_bytes": room_bytes, "varies_answers": True}
    with _explaining(optimizer_name(optimizer)):
        try:
            return _stepped(optimizer, parameters, how)
        except InvalidInput:
            raise
        except Exception as error:
            try:
                return _steady(ClosureTwin(optimizer, parameters, **how))
            except Exception:
                raise error from None  # a closure did not help, so the first error tells more


class _ImpossibleAnswer(Exception):
    """A step failed, or made something huge, with an answer that was made up."""


def _stepped(optimizer: _Source, parameters: Sequence[nn.Parameter], how: _How) -> OptimizerMemory:
    try:
        return _steady(SteppedTwin(optimizer, parameters, **how))
    except _ImpossibleAnswer:
        plain: _How = {**how, "varies_answers": False}
        return _steady(SteppedTwin(optimizer, parameters, **plain))


def _steady(twin: "SteppedTwin") -> OptimizerMemory:
    """Step until steps leave the state as big as they found it, and all that the twin wants to see was seen."""
    seen: list[OptimizerMemory] = []
    unchanged = 0
    for _ in range(_MOST_STEPS):
        before_bytes = twin.state_bytes()
        seen.append(twin.step())
        unchanged = unchanged + 1 if twin.state_bytes() == before_bytes else 0
        if unchanged and unchanged >= twin.steady_steps:
            break
    return _highest(seen)


def _highest(seen: Sequence[OptimizerMemory]) -> OptimizerMemory:
    """Return the step that takes most, beside the largest state that any step finds."""
    state_bytes = max(each.state_bytes for each in seen)
    top = max(_level_bytes(each) for each in seen)
    steady = max((each for each in seen if each.state_bytes == state_bytes), key=_level_bytes)
    if _level_bytes(steady) == top:
        return steady
    rise_bytes = top - state_bytes  # a step that found less state took more than all that found the largest
    return OptimizerMemory(state_bytes=state_bytes, workspace_bytes=rise_bytes, changes_bytes=(rise_bytes, -rise_bytes))


class SteppedTwin:
    """An optimizer like the given one, whose parameters, gradients and state are tensors without memory.

    All of them are made under `LiveBytes`, which sees the release of what was allocated under it alone.

    Note [Both branches]
        A step may ask for values (a step count, whether something is finite) and go one way or the other. Each step of
        a twin gets other answers, until all were given: a small and a large number, that many periods divide, and
        yes and no. Optimizers of torch do the same in each step but for what they ask; others may count steps
        in a number of Python's, so they make some more. Where a step cannot be with an answer, none is varied.
    """

    def __init__(self, optimizer: _Source, parameters: Sequence[nn.Parameter], **how: Unpack[_How]) -> None:
        self._first_step: tuple[BlockEvent, ...] = ()
        self._for_cuda = how["for_cuda"]
        self._room_bytes = how["room_bytes"]
        self._mode = _torch.FakeTensorMode()
        self._questions = AnsweredQuestions(varies=how["varies_answers"])
        self._live = LiveBytes(notes_calls=_MATRIX_PRODUCTS, notes_levels=True)
        with self._without_memory():
            self._twin, originals = _twin(optimizer, parameters)
            if self._for_cuda:
                _choose_foreach(self._twin)
        self._stand_ins = [stand_in for stand_in, _ in originals]
        self._trained = [
            stand_in
            for stand_in, original in originals
            if stand_in.requires_grad and id(original) not in how["skipped"]
        ]

    @property
    def steady_steps(self) -> int:
        """Return how many steps leave the state as big as it was until it is believed to stay so."""
        own_steps = 1 if type(self._twin).__module__.startswith("torch.optim.") else _CYCLE_STEPS
        return max(own_steps, self._questions.rounds)

    def state_bytes(self) -> int:
        """Drop the gradients, as `zero_grad` does, and return what else is live beside the parameters."""
        for stand_in in self._stand_ins:
            stand_in.grad = None
        return self._live.live_bytes - storage_bytes([self._stand_ins, self._twin.param_groups])

    def step(self) -> OptimizerMemory:
        """Make gradients and step."""
        state_bytes = self.state_bytes()
        self._step_once()
        events = tuple(self._live.events)
        self._first_step = self._first_step or events
        memory = self._memory(state_bytes, self._live.levels_bytes[0])
        self._measure_products()
        if sum(size_bytes for _, size_bytes in self._first_step) != state_bytes:
            return memory  # more than one step makes the state: only sums say what it is
        return dataclasses.replace(memory, blocks=OptimizerBlocks(first_step=self._first_step, later_step=events))

    def _step_once(self) -> None:
        varied = self._questions.is_varied
        with self._without_memory(), _torch.silent_fake_errors() if varied else contextlib.nullcontext():
            self._make_gradients()
            self._live.start_anew()
            try:
                self._twin.step()
            except Exception as error:
                if varied:
                    raise _ImpossibleAnswer from error
                raise
        largest_bytes = max((size_bytes for _, size_bytes in self._live.events), default=0)
        if varied and largest_bytes >= max(LARGE_NUMBER, 2 * storage_bytes(self._stand_ins)):
            raise _ImpossibleAnswer  # it was taken for a size
        self._questions.next_round()

    def _measure_products(self) -> None:
        """Learn for the next step what matrix products allocate inside, if they run here as they do in training."""
        unknown = self._live.calls - self._live.costs.keys()
        if unknown and not (self._for_cuda and not is_accelerator(self._stand_ins[0].device)):
            device = str(self._stand_ins[0].device)
            self._live.costs |= measured_costs(sorted(unknown), device=device, room_bytes=self._room_bytes)

    def _make_gradients(self) -> None:
        for stand_in in self._trained:
            stand_in.grad = torch.empty_like(stand_in)

    def _memory(self, state_bytes: int, start_bytes: int) -> OptimizerMemory:
        return OptimizerMemory(
            state_bytes=state_bytes,
            workspace_bytes=max(0, self._live.peak_bytes - start_bytes),
            changes_bytes=_changes([level_bytes - start_bytes for level_bytes in self._live.levels_bytes]),
        )

    @contextlib.contextmanager
    def _without_memory(self) -> Iterator[None]:
        eager = torch.compiler.set_stance("force_eager")  # some compile their step, which takes memory
        with self._mode, eager, self._questions, self._live:
            yield


class ClosureTwin(SteppedTwin):
    """A twin whose step calls a closure that computes the loss and its gradients.

    Whether such an optimizer goes on depends on values. They come from steps of a small optimizer of the same class
    and settings with memory, see `SmallDescent`, if one can be made. What the optimizer holds whenever it calls the
    closure is live during the forward and the backward pass, and counts as state.
    """

    def __init__(self, optimizer: _Source, parameters: Sequence[nn.Parameter], **how: Unpack[_How]) -> None:
        super().__init__(optimizer, parameters, **how)
        self._small: SmallDescent | None = None
        with contextlib.suppress(Exception):  # its class may want more than its settings
            self._small = SmallDescent(optimizer, self._twin)
        self._held_bytes = 0
        self._highest: OptimizerMemory | None = None

    @property
    def steady_steps(self) -> int:
        """Return one step to see it, and as many as give each of `_VARIED_FACTORS` its turn."""
        return 4

    def step(self) -> OptimizerMemory:
        before_bytes = self.state_bytes()
        self._held_bytes = max(self._held_bytes, before_bytes)  # some steps hold more than others
        self._questions.answers = deque(self._small.step() if self._small else ())
        with self._without_memory():
            self._make_gradients()
            self._live.start_anew()
            self._twin.step(self._closure)  # type: ignore[arg-type]
        resident_bytes = storage_bytes([self._stand_ins, self._twin.param_groups])
        gradient_bytes = storage_bytes([stand_in.grad for stand_in in self._trained])
        memory = self._memory(self._held_bytes, resident_bytes + gradient_bytes + self._held_bytes)
        if self._highest is None or _level_bytes(memory) > _level_bytes(self._highest):
            self._highest = memory
        if self._small is not None and self.state_bytes() == before_bytes:
            self._small.varies = True
        return dataclasses.replace(
            self._highest,
            state_bytes=self._held_bytes,
            workspace_bytes=max(0, _level_bytes(self._highest) - self._held_bytes),
        )

    def _closure(self) -> torch.Tensor:
        self._held_bytes = max(self._held_bytes, self.state_bytes())
        self._make_gradients()
        return torch.empty(())


class SmallDescent:
    """An optimizer over a few numbers that goes downhill for hundreds of steps, for the answers that it finds.

    The loss falls at every call. The gradient shrinks, so its change along a step is positive, and changes its sign
    at every second call, as beyond a minimum, where a line search looks between two points. Once `varies` is set, it
    grows now and then: L-BFGS adds no such step to its history, and holds it beside.
    """

    def __init__(self, optimizer: _Source, twin: Optimizer) -> None:
        self._parameters = [
            nn.Parameter(torch.ones([1] * parameter.dim(), dtype=torch.float64))
            for group in twin.param_groups
            for parameter in group["params"]
        ]
        self._optimizer = _small_optimizer(optimizer, self._parameters)
        self._loss, self._gradient, self._calls = 0.0, _FIRST_GRADIENT, 0
        for group in self._optimizer.param_groups:
            rate = group.get("lr")  # with a lower one than 1 steps would get too short to go on
            group["lr"] = torch.ones_like(rate) if isinstance(rate, torch.Tensor) else 1.0
        self.varies = False

    def step(self) -> list[Any]:
        """Step, and return the answers to all questions about values."""
        self._make_gradients()
        with NotedAnswers() as noted:
            self._optimizer.step(self._closure)  # type: ignore[arg-type]
        return list(noted.answers)

    def _closure(self) -> torch.Tensor:
        factors = _VARIED_FACTORS if self.varies else _FACTORS
        self._gradient *= factors[self._calls % len(factors)]
        self._calls += 1
        self._loss -= _FALL_OF_LOSS
        self._make_gradients()
        return torch.tensor(self._loss, dtype=torch.float64)

    def _make_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = torch.full_like(parameter, self._gradient)


def _level_bytes(memory: OptimizerMemory) -> int:
    return memory.state_bytes + memory.workspace_bytes


def _small_optimizer(optimizer: _Source, parameters: Sequence[nn.Parameter]) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        return _maker(optimizer)(parameters)
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name in optimizer.defaults}
    return type(optimizer)(parameters, **settings)


def _changes(levels_bytes: Sequence[int]) -> tuple[int, ...]:
    """Changes from one highest or lowest level so far to the next, from 0, and from the last of them to the end."""
    points, is_high = [0], False
    highest = lowest = 0
    for level_bytes in levels_bytes:
        if lowest <= level_bytes <= highest:
            continue
        if len(points) > 1 and is_high == (level_bytes > highest):
            points.pop()  # a rise goes on, or a fall
        is_high = level_bytes > highest
        highest, lowest = max(highest, level_bytes), min(lowest, level_bytes)
        points.append(level_bytes)
    points.append(levels_bytes[-1])
    return tuple(later - earlier for earlier, later in itertools.pairwise(points) if later != earlier)


def optimizer_name(optimizer: OptimizerLike) -> str:
    """What to call an optimizer in a sentence."""
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, Optimizer):
        return type(optimizer).__name__
    if isinstance(optimizer, KnownMemory):
        return optimizer.name
    return getattr(optimizer, "__name__", type(optimizer).__name__)


def _twin(
    optimizer: _Source, parameters: Sequence[nn.Parameter]
) -> tuple[Optimizer, list[tuple[nn.Parameter, nn.Parameter]]]:
    """An optimizer like the given one over stand-ins without memory, and whom each stands in for."""
    originals: list[tuple[nn.Parameter, nn.Parameter]] = []

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        originals.append((_stand_in(parameter), parameter))
        return originals[-1][0]

    if isinstance(optimizer, Optimizer):
        twin = twin_over(optimizer, stand_in)
        twin.param_groups = [_without_memory(group) | {"params": group["params"]} for group in twin.param_groups]
    else:
        twin = _maker(optimizer)([stand_in(parameter) for parameter in parameters if parameter.requires_grad])
    return twin, originals


def _without_memory(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of which some are tensors, such as a learning rate, as tensors without memory."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in settings.items()
        if name != "params"
    }


def _choose_foreach(optimizer: Optimizer) -> None:
    """Choose as torch does for parameters on CUDA; the parameters here are on another device."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


def _maker(optimizer: str | Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    check_optimizer(optimizer)
    return _BY_NAME[optimizer.lower()] if isinstance(optimizer, str) else optimizer


def check_optimizer(optimizer: OptimizerLike | None) -> None:
    """Refuse an unknown name at once, before minutes are spent on the model."""
    if isinstance(optimizer, str) and optimizer.lower() not in _BY_NAME:
        raise InvalidInput(
            f"unknown optimizer {optimizer!r}{suggestion(optimizer, _BY_NAME)}; known are "
            f"{', '.join(sorted(_BY_NAME))}, or give an instance"
        )


def known_optimizers() -> list[str]:
    """The names that can be given."""
    return sorted(_BY_NAME)


def is_optimizer_name(name: str | None) -> bool:
    """Whether an optimizer can be named so."""
    return name is not None and name.lower() in _BY_NAME


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    here = local_part(parameter)  # an optimizer of sharded parameters works on what is in this process
    empty = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device=here.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def _explaining(name: str) -> Iterator[None]:
    try:
        yield
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"the optimizer {name} could not be stepped without memory ({type(error).__name__}: {first_line(error)}); "
            "estimate without an optimizer and add its state by hand"
        ) from error
