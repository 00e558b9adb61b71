"""A region that runs unplanned and leaves marks, so that the step around it can be measured."""

from typing import Any

import torch

from memfit import _torch
from memfit._memory_events import set_mark
from memfit.capture.outputs import take_apart
from memfit.capture.sample import Sample
from memfit.capture.spilled import would_live
from memfit.capture.trace import Joint
from memfit.execute.compiled import Boxed, CompiledCall
from memfit.ir import Graph, Kind, Phase, Program
from memfit.plan.regions import Surroundings, shared_storages
from memfit.tensors import storage_key, tensors_in
from memfit.trees import leaves_of

BEGIN, END = "begin", "end"


class MarkedCall:
    """Runs a captured call, marks where its passes begin and end, and watches what it shares with others.

    Of several calls in one step, the last to go forward is the first to come back. That decides only which
    call's arguments are looked at: all calls keep the same.
    """

    def __init__(self, number: int, joint: Joint, graph: Graph, program: Program, sample: Sample) -> None:
        self._number = number
        self._graph = graph
        self._names = sample.leaf_names()
        self._call = CompiledCall(joint, graph, program, around_backward=self._around_backward)
        self.guards = self._call.guards
        self.questions = self._call.questions
        self.forget()

    def forget(self) -> None:
        """Begin anew, for another step."""
        self._waiting: list[dict[int, _torch.StorageWeakRef]] = []
        self._there: list[frozenset[int]] = []
        self._left: list[frozenset[int]] = []

    def surroundings(self) -> Surroundings:
        """What all calls of the step have in common; where that is not known, what costs the region most."""
        return Surroundings(
            there=frozenset.intersection(*self._there) if self._there else frozenset(),
            left=frozenset.union(*self._left)
            if self._left
            else shared_storages(self._graph).union(self._graph.tangents),
        )

    def look_again(self) -> None:
        """Expect other parameters, with other hooks, at the next call."""
        self._call.look_again()

    def __call__(self, states: Any, args: Any, kwargs: Any) -> Any:
        shared = self._given(args, kwargs)
        self._mark(Phase.FORWARD, BEGIN)
        output = self._call(states, args, kwargs)
        self._mark(Phase.FORWARD, END)
        shared |= self._returned(output, states, (args, kwargs))
        self._waiting.append({index: _torch.StorageWeakRef(each.untyped_storage()) for index, each in shared.items()})
        return output

    def _around_backward(self, backward: Boxed) -> Boxed:
        def marked(arguments: list[Any]) -> list[Any]:
            watched = self._waiting.pop() if self._waiting else {}
            self._there.append(_alive(watched))
            handed_in = self._handed_in(arguments)
            self._mark(Phase.BACKWARD, BEGIN)
            gradients = backward(arguments)
            self._mark(Phase.BACKWARD, END)
            unknown = shared_storages(self._graph) - watched.keys()
            self._left.append(_alive(watched) | _alive(handed_in) | unknown)
            return gradients

        return marked

    def _mark(self, phase: Phase, end: str) -> None:
        set_mark(f"{self._number} {phase} {end}")

    def _given(self, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
        """Arguments by the storage that stands for them."""
        batch = {each.name: index for index, each in enumerate(self._graph.storages) if each.kind is Kind.BATCH}
        leaves = zip(self._names, leaves_of((args, kwargs)), strict=True)
        return {batch[name]: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor) and name in batch}

    def _handed_in(self, arguments: list[Any]) -> dict[int, _torch.StorageWeakRef]:
        """Gradients of results by the storage that stands for them; the last arguments of a backward pass."""
        tangents = self._graph.tangents
        last = arguments[len(arguments) - len(tangents) :]
        return {
            index: _torch.StorageWeakRef(each.untyped_storage())
            for index, each in zip(tangents, last, strict=True)
            if isinstance(each, torch.Tensor)
        }

    def _returned(self, output: Any, states: Any, given: Any) -> dict[int, torch.Tensor]:
        """Results by the storage that stands for them; none if they cannot be told apart."""
        known = {storage_key(each) for each in (*states, *tensors_in(given))}
        fresh = {storage_key(each): each for each in take_apart(output)[0] if storage_key(each) not in known}
        shared = shared_storages(self._graph)
        results = [each for each in self._graph.held if each in shared]
        return dict(zip(results, fresh.values(), strict=True)) if len(results) == len(fresh) else {}


def _alive(watched: dict[int, _torch.StorageWeakRef]) -> frozenset[int]:
    return frozenset(index for index, reference in watched.items() if would_live(reference))
