"""Write down what operators of a run take and release, in their order, as a graph and its program.

Note [Lives of storages]
    Torch keeps the Python object of a storage as long as the storage itself, so the finalizer of that object tells when
    the storage is released, whoever held it last: autograd, a variable of the model's code, or an argument.

Note [Written over]
    Where tensors are of a subclass, some of torch's own code makes a new tensor where it would write over one that is
    its own. What such an operator makes is written down as what it would write over. Where the engine adds up two
    gradients it does so only if nobody else holds the first, which then is released right behind.
"""

import dataclasses
import enum
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memfit import _torch
from memfit.capture.record import Mark, draws
from memfit.ir import Compute, Free, Graph, Instruction, Kind, Operation, Phase, Program, Storage
from memfit.measure import signature
from memfit.ops.registry import name_of
from memfit.tensors import storage_key, tensors_in

_WRITTEN_OUT = torch.ops.aten.lift_fresh.default  # what `torch.tensor([1, 2])` ends with, of a tensor with memory


@dataclasses.dataclass
class _Draft:
    """A storage whose kind is not settled yet."""

    name: str
    mark: Mark
    phase: Phase | None  # None: there before the step
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: Kind | None = None


class WrittenOver(enum.Enum):
    """Whether eager writes over the first argument of an operator, see Note [Written over]."""

    NO = enum.auto()
    IF_LAST = enum.auto()  # if nobody else holds it
    YES = enum.auto()


class Journal:
    """Writes down a step, operator by operator, see Note [Lives of storages]."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._places: dict[int, int] = {}  # by identity of a storage that lives
        self._resident: list[int] = []
        self._operations: list[Operation] = []
        self._names: dict[str, int] = {}
        self._phase = Phase.FORWARD
        self._makers: dict[int, tuple[str, int | None]] = {}  # operator and node of autograd
        self._passes: dict[Phase, list[Instruction]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        self._finalizers: list[Any] = []
        self._last_held: int | None = None  # what the last operation takes over, if it is released right behind
        self._gone: set[int] = set()  # places that were taken over

    def add_resident(self, tensor: torch.Tensor, name: str, kind: Kind, mark: Mark) -> None:
        """Note a tensor that is there before the step."""
        if storage_key(tensor) not in self._places:
            self._resident.append(self._add(tensor, name, mark, None))
            self._drafts[-1].kind = kind

    def begin_backward(self) -> None:
        self._phase = Phase.BACKWARD

    def maker(self, tensor: torch.Tensor) -> str:
        """Return the operator that made the storage of a tensor, "" if the step did not."""
        place = self._places.get(storage_key(tensor))
        return "" if place is None else self._makers.get(place, ("", None))[0]

    def node(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the node of autograd that made the storage of a tensor, None if no node did."""
        place = self._places.get(storage_key(tensor))
        return None if place is None else self._makers.get(place, ("", None))[1]

    def write(
        self,
        operator: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        mark: Mark,
        *,
        node: int | None = None,
        over: WrittenOver = WrittenOver.NO,
    ) -> None:
        """Note what an operator read and made, for which node of autograd, see Note [Written over]."""
        if operator is not _WRITTEN_OUT:
            self._add_constants(tensors_in((args, kwargs)), mark)
        name = self._name_of_call(operator)
        given = [self._places[storage_key(each)] for each in tensors_in((args, kwargs)) if self._is_known(each)]
        fresh = {storage_key(each): each for each in tensors_in(result) if not self._is_known(each)}
        if not fresh and not operator._schema.is_mutable:
            return  # a view
        made = tuple(self._add(each, name, mark, self._phase) for each in fresh.values())
        self._operations.append(
            Operation(
                name=name,
                target=name_of(operator),
                phase=self._phase,
                inputs=tuple(dict.fromkeys(given)),
                outputs=made,
                signature=signature.encode(operator, args, kwargs),
                random=draws(operator),
                module=mark.module,
                source=mark.source,
            )
        )
        self._makers |= dict.fromkeys(made, (name_of(operator), node))
        self._passes[self._phase].append(Compute(len(self._operations) - 1))
        if over is WrittenOver.YES:
            self._take_over(given[0])
        self._last_held = given[0] if over is WrittenOver.IF_LAST and made and given else None

    def finish(
        self, outputs: Iterable[torch.Tensor], gradients: Iterable[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[Graph, Program]:
        """Return what was written down. Gradients come with what they are gradients of."""
        for finalizer in self._finalizers:
            finalizer.detach()
        held = [self._places[storage_key(each)] for each in outputs if self._is_known(each)]
        for each in held:
            self._drafts[each].kind = self._drafts[each].kind or Kind.OUTPUT
        trained = {self._places[storage_key(leaf)]: self._places[storage_key(gradient)] for leaf, gradient in gradients}
        for leaf, gradient in trained.items():
            self._name_gradient(leaf, gradient)
        graph = Graph(
            storages=tuple(self._storages()),
            operations=tuple(self._operations),
            resident=tuple(self._resident),
            tangents=(),
            held=tuple(dict.fromkeys((*held, *trained.values()))),
            trained=tuple(
                (leaf, gradient) for leaf, gradient in trained.items() if self._drafts[leaf].kind is Kind.PARAMETER
            ),
        )
        return graph, Program(
            graph_digest=graph.digest(),
            forward=tuple(self._passes[Phase.FORWARD]),
            backward=tuple(self._passes[Phase.BACKWARD]),
        )

    def _name_gradient(self, leaf: int, gradient: int) -> None:
        draft = self._drafts[gradient]
        draft.kind = Kind.GRADIENT
        draft.mark = dataclasses.replace(draft.mark, module=self._drafts[leaf].mark.module)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._places

    def _add_constants(self, given: list[torch.Tensor], mark: Mark) -> None:
        """Tensors with memory that are neither parameters nor buffers: attributes, variables outside of the model."""
        for each in given:
            if not isinstance(each, _torch.FakeTensor):
                self.add_resident(each, "constant", Kind.BUFFER, mark)

    def _name_of_call(self, operator: Any) -> str:
        """`add`, then `add_1`."""
        base = operator._schema.name.partition("::")[2].rstrip("_")
        count = self._names.get(base, 0)
        self._names[base] = count + 1
        return f"{base}_{count}" if count else base

    def _add(self, tensor: torch.Tensor, name: str, mark: Mark, phase: Phase | None) -> int:
        place = len(self._drafts)
        self._drafts.append(
            _Draft(
                name=name,
                mark=mark,
                phase=phase,
                size_bytes=tensor.untyped_storage().nbytes(),
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
            )
        )
        storage = tensor.untyped_storage()
        self._places[storage._cdata] = place
        finalizer = weakref.finalize(storage, self._release, storage._cdata, place)
        finalizer.atexit = False
        self._finalizers.append(finalizer)
        return place

    def _release(self, key: int, place: int) -> None:
        del self._places[key]
        instructions = self._passes[self._phase]
        if place == self._last_held and instructions[-1:] == [Compute(len(self._operations) - 1)]:
            self._take_over(place)
        elif self._drafts[place].phase is not None and place not in self._gone:
            instructions.append(Free(place))

    def _take_over(self, place: int) -> None:
        """Let the last operation make its result in a place that is there."""
        self._gone.add(place)
        self._operations[-1] = dataclasses.replace(self._operations[-1], overwrites=place, may_overwrite=place)
        self._passes[self._phase][-1] = Compute(len(self._operations) - 1, in_place=True)

    def _storages(self) -> Iterable[Storage]:
        read_in_backward = {index for each in self._operations if each.phase is Phase.BACKWARD for index in each.inputs}
        for index, draft in enumerate(self._drafts):
            crosses = draft.phase is Phase.FORWARD and index in read_in_backward
            yield Storage(
                name=draft.name,
                size_bytes=draft.size_bytes,
                kind=draft.kind or (Kind.ACTIVATION if crosses else Kind.TEMPORARY),
                dtype=draft.dtype,
                shape=draft.shape,
                module=draft.mark.module,
                source=draft.mark.source,
            )
