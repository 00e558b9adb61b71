"""An engine on tensors without memory: the same code, no numbers, nothing left behind."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from memfit import _torch
from memfit.optimizer_twin import empty_twin
from memfit.step.tiers import Place, TieredState
from memfit.step.updater import Updater

if TYPE_CHECKING:
    from memfit.multilevel.engine import Engine
    from memfit.multilevel.problems import Problem

_COUNTERS = ("count", "inner_loop_start", "record", "trajectory", "snapshot", "score", "baseline")


@contextlib.contextmanager
def rehearsed(engine: "Engine") -> Iterator[None]:
    """Run the engine's code on tensors without memory for a while; parameters, counters and loaders stay."""
    batches = {problem: problem.peek() for problem in engine.problems}
    ready = {problem: dict(flags) for problem, flags in engine.ready.items()}
    step = engine.global_step
    engine.openness.all()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch.FakeTensorMode(allow_non_fake_inputs=True))
        fakes: dict[int, torch.Tensor] = {}
        for problem in engine.problems:
            stack.enter_context(_stand_in(problem, batches[problem], fakes))
        engine.is_rehearsing = True
        try:
            yield
        finally:
            engine.is_rehearsing = False
            engine.openness.all()
            engine.ready, engine.global_step = ready, step


@contextlib.contextmanager
def _stand_in(problem: "Problem", batch: Any, fakes: dict[int, torch.Tensor]) -> Iterator[None]:
    """A problem over stand-ins of its parameters, buffers, optimizer and batches."""
    places = [(part, dict(part._parameters), dict(part._buffers)) for part in problem.module.modules()]
    kept = {name: getattr(problem, name) for name in _COUNTERS}
    own = (problem.parameter_list, problem.optimizer, problem.scheduler, problem.updater)
    get_batch = problem.__dict__.get("get_batch")
    for part, parameters, buffers in places:
        for name, tensor in (*parameters.items(), *buffers.items()):
            holder = part._parameters if name in parameters else part._buffers
            holder[name] = None if tensor is None else _fake(tensor, fakes)
    problem.parameter_list = [_fake(parameter, fakes) for parameter in own[0]]  # type: ignore[misc]
    problem.optimizer = None if own[1] is None else _fake_optimizer(own[1], fakes)
    problem.updater = None if own[3] is None else _fake_updater(problem)
    problem.scheduler = None
    problem.trajectory, problem.score, problem.baseline = [], {}, {}
    problem.record, problem.snapshot, problem.inner_loop_start = None, None, True
    # As if warmed up, at the start of an inner loop.
    problem.count = -(-problem.config.warmup_steps // problem.config.unroll_steps) * problem.config.unroll_steps
    problem.__dict__["get_batch"] = lambda: pytree.tree_map_only(torch.Tensor, torch.empty_like, batch)
    try:
        yield
    finally:
        for part, parameters, buffers in places:
            part._parameters.update(parameters)
            part._buffers.update(buffers)
        problem.parameter_list, problem.optimizer, problem.scheduler, problem.updater = own
        del problem.__dict__["get_batch"]
        if get_batch is not None:
            problem.__dict__["get_batch"] = get_batch
        for name, value in kept.items():
            setattr(problem, name, value)


def _fake(tensor: torch.Tensor, fakes: dict[int, torch.Tensor]) -> torch.Tensor:
    """The stand-in of a tensor, the same one every time."""
    if id(tensor) not in fakes:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        fakes[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return fakes[id(tensor)]


def _fake_optimizer(optimizer: Optimizer, fakes: dict[int, torch.Tensor]) -> Optimizer:
    twin = empty_twin(optimizer)
    twin.param_groups = [
        group | {"params": [_fake(parameter, fakes) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return twin


def _fake_updater(problem: "Problem") -> Updater:
    policy = problem.config.step_policy
    assert problem.optimizer is not None
    states = TieredState(_Elsewhere()) if policy.state_tier else None
    return Updater(problem.module, problem.optimizer, policy, problem.torch_device, seed=0, states=states)


class _Elsewhere:
    """A tier of which only what is brought beside the parameters takes memory."""

    def reserve(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Place:
        return Place(tensor=torch.empty((), dtype=dtype, device=device).expand(shape), device=device)

    def read(self, place: Place, rows: slice | None) -> "Future[torch.Tensor]":
        read: Future[torch.Tensor] = Future()
        shape = place.tensor.shape if rows is None else (rows.stop - rows.start,)
        read.set_result(torch.empty(shape, dtype=place.tensor.dtype, device=place.device))
        return read

    def write(self, place: Place, rows: slice | None, value: torch.Tensor) -> None:
        pass

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass
