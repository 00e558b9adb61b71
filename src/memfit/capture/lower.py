"""From torch's joint graph to ours: operations over storages.

Views and aliases fold into the storage they show, see Note [Values are storages] in `ir.py`.

Note [Accumulated gradients]
    Autograd hands a gradient to its parameter as it is when the parameter can own it. It makes
    a new one when the gradient's layout differs from the parameter's, when another parameter
    was given the same memory, and when a tied parameter gets a second gradient. That copy or
    sum happens outside the traced graph; it stands in ours as an operation called `ACCUMULATE`.
"""

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from memfit.accelerator import is_accelerator
from memfit.capture.nodes import (
    FORM_OF,
    REMAKES,
    TECHNIQUE,
    arguments_of,
    autograd_node,
    is_alternative,
    is_operator,
    is_random,
    mark_of,
    tensors_of,
    works_in_place,
)
from memfit.capture.record import Mark
from memfit.capture.trace import ROOT, Joint
from memfit.ir import ACCUMULATE, Graph, Kind, Operation, Phase, Storage
from memfit.measure import signature
from memfit.ops import cross_entropy
from memfit.ops.inplace import in_place_form
from memfit.ops.lean import is_backward
from memfit.ops.registry import name_of
from memfit.ops.stretch import Stretch
from memfit.tensors import storage_key


def lower(joint: Joint) -> Graph:
    """Describe a joint graph as storages and operations, in the eager run's order."""
    return _Lowering(joint.graph_module.graph, joint.input_names).graph()


@dataclasses.dataclass
class _Draft:
    """A storage whose kind is not settled yet."""

    name: str
    value: torch.Tensor  # the first tensor that lives in it
    mark: Mark
    phase: Phase | None  # None: exists before the step
    kind: Kind | None = None


class _Lowering:
    def __init__(self, graph: fx.Graph, input_names: list[str]) -> None:
        self._nodes = [node for node in graph.nodes if not is_alternative(node)]
        self._alternatives = [node for node in graph.nodes if is_alternative(node)]
        self._input_names = input_names
        self._indices: dict[int, int] = {}  # torch's storage identity to ours
        self._drafts: list[_Draft] = []
        self._parameters: dict[str, int] = {}
        self._resident: list[int] = []
        self._tangents: list[int] = []
        self._held: list[int] = []
        self._written_back: list[int] = []
        self._gradients: dict[int, int] = {}  # parameter to gradient
        self._operations: list[Operation] = []
        self._frames: dict[int, int] = {}
        self._last_use = self._find_last_uses()
        values = (value for node in self._nodes for value in tensors_of(node))
        self._is_on_accelerator = any(is_accelerator(value.device) for value in values)
        self._forward_targets = {
            node.meta.get("seq_nr"): node.target for node in self._nodes if is_operator(node) and not is_backward(node)
        }

    def graph(self) -> Graph:
        for node in self._nodes:
            if node.op == "placeholder":
                self._add_placeholder(node)
            elif node.op == "get_attr":
                self._add_constant(node)
        for position, node in enumerate(self._nodes):
            if is_operator(node):
                self._add_operation(node, position)
        self._add_outputs(self._nodes[-1])
        alternatives = tuple(self._alternative(node) for node in self._alternatives)
        return Graph(
            storages=tuple(self._storages()),
            operations=tuple(self._operations),
            resident=tuple(self._resident),
            tangents=tuple(self._tangents),
            held=tuple(dict.fromkeys((*self._held, *self._gradients.values()))),
            written_back=tuple(dict.fromkeys(self._written_back)),
            trained=tuple(self._gradients.items()),
            alternatives=alternatives,
        )

    def _add_placeholder(self, node: fx.Node) -> None:
        description = node.meta["desc"]
        kind = _PLACEHOLDER_KINDS.get(type(description).__name__, Kind.BATCH)
        path = getattr(description, "target", "").removeprefix(ROOT + ".")
        for value in tensors_of(node):
            if storage_key(value) not in self._indices:
                is_tangent = kind is Kind.TEMPORARY
                name = path or self._input_name(description) or node.name
                index = self._add(value, name, _owner(path), Phase.BACKWARD if is_tangent else None)
                self._drafts[index].kind = kind
                (self._tangents if is_tangent else self._resident).append(index)
            if kind is Kind.PARAMETER:
                self._parameters[path] = self._indices[storage_key(value)]

    def _add_constant(self, node: fx.Node) -> None:
        """A tensor written out in the model's code, such as `torch.tensor([1, 2])`."""
        for value in tensors_of(node):
            if storage_key(value) not in self._indices:
                index = self._add(value, node.name, mark_of(node), None)
                self._drafts[index].kind = Kind.BUFFER
                self._resident.append(index)

    def _frame(self, node: fx.Node) -> int | None:
        """Autograd's own numbers go on from capture to capture; ours start at 0."""
        number = autograd_node(node)
        return None if number is None else self._frames.setdefault(number, len(self._frames))

    def _input_name(self, description: Any) -> str:
        place = getattr(description, "idx", len(self._input_names))
        return self._input_names[place] if place < len(self._input_names) else ""

    def _add_operation(self, node: fx.Node, position: int) -> None:
        phase = Phase.BACKWARD if is_backward(node) else Phase.FORWARD
        mark = mark_of(node)
        inputs = tuple(dict.fromkeys(self._inputs(node)))
        fresh = {
            storage_key(value): value for value in tensors_of(node) if storage_key(value) not in self._indices
        }.values()
        if not fresh:
            return  # a view
        args, kwargs = arguments_of(node)
        may_overwrite = self._may_overwrite(node)
        overwrites = may_overwrite if self._does_overwrite(node, position, may_overwrite) else None
        self._operations.append(
            Operation(
                name=node.name,
                target=name_of(node.target),
                phase=phase,
                inputs=inputs,
                outputs=tuple(self._add(value, node.name, mark, phase) for value in fresh),
                overwrites=overwrites,
                may_overwrite=may_overwrite,
                signature=signature.encode(node.target, args, kwargs),
                flops=_flops(node, args, kwargs),
                random=is_random(node),
                frame=self._frame(node),
                checkpoint=mark.checkpoint,
                module=mark.module,
                source=mark.source,
            )
        )

    def _alternative(self, node: fx.Node) -> Operation:
        """See Note [Alternatives] in `ir.py`."""
        mark = mark_of(node)
        args, kwargs = arguments_of(node)
        phase = Phase.BACKWARD if is_backward(node) else Phase.FORWARD
        if REMAKES in node.meta:
            made = [self._indices[storage_key(value)] for value in tensors_of(node.meta[REMAKES])]
        else:
            of, form = node.meta[FORM_OF]
            name = f"{of.args[0] if of.target is operator.getitem else of}.{form}"
            made = [self._add(value, name, mark, phase) for value in tensors_of(node)]
            for index in made:
                self._drafts[index].kind = Kind.ACTIVATION  # why else would it be made
        return Operation(
            name=node.name,
            target=name_of(node.target),
            phase=phase,
            inputs=tuple(dict.fromkeys(self._inputs(node))),
            outputs=tuple(dict.fromkeys(made)),
            may_overwrite=self._may_overwrite(node) if phase is Phase.BACKWARD else None,
            signature=signature.encode(node.target, args, kwargs),
            frame=self._frame(node),
            checkpoint=mark.checkpoint,
            technique=node.meta[TECHNIQUE],
            module=mark.module,
            source=mark.source,
        )

    def _add_outputs(self, output: fx.Node) -> None:
        """Tell outputs, gradients and new buffer values apart."""
        accumulations: list[Operation] = []
        nodes: Any = output.args[0]
        for node, description in zip(nodes, output.meta["desc"], strict=True):
            if not isinstance(node, fx.Node):
                continue
            (value,) = tensors_of(node)
            index = self._indices[storage_key(value)]
            kind = _OUTPUT_KINDS.get(type(description).__name__)
            parameter = self._parameters.get(_trained_path(description))
            if kind is Kind.GRADIENT and parameter is not None:
                accumulations += self._add_gradient(parameter, index, value)
            elif kind is None:
                self._written_back.append(index)
            else:
                self._held.append(index)
                self._drafts[index].kind = self._drafts[index].kind or kind
        for gradient in self._gradients.values():
            self._drafts[gradient].kind = Kind.GRADIENT
        self._operations = _merged(self._operations, accumulations)

    def _add_gradient(self, parameter: int, gradient: int, value: torch.Tensor) -> Iterator[Operation]:
        """See Note [Accumulated gradients]."""
        earlier = self._gradients.get(parameter)
        if earlier is None and gradient not in self._gradients.values() and self._can_own(parameter, value):
            self._gradients[parameter] = gradient
            return
        draft = self._drafts[parameter]
        total = len(self._drafts)
        self._drafts.append(dataclasses.replace(draft, name=f"{draft.name}.grad", phase=Phase.BACKWARD, kind=None))
        self._gradients[parameter] = total
        yield Operation(
            name=f"accumulate_{total}",
            target=ACCUMULATE,
            phase=Phase.BACKWARD,
            inputs=(gradient,) if earlier is None else (earlier, gradient),
            outputs=(total,),
            module=draft.mark.module,
        )

    def _can_own(self, parameter: int, gradient: torch.Tensor) -> bool:
        return gradient.numel() * gradient.element_size() == gradient.untyped_storage().nbytes() and _layout(
            gradient
        ) == _layout(self._drafts[parameter].value)

    def _add(self, value: torch.Tensor, name: str, mark: Mark, phase: Phase | None) -> int:
        self._indices[storage_key(value)] = len(self._drafts)
        self._drafts.append(_Draft(name=name, value=value, mark=mark, phase=phase))
        return len(self._drafts) - 1

    def _inputs(self, node: fx.Node) -> Iterator[int]:
        for source in node.all_input_nodes:
            for value in tensors_of(source):
                yield self._indices[storage_key(value)]

    def _find_last_uses(self) -> dict[int, int]:
        """Where each storage is read for the last time, by any of its views."""
        last_use: dict[int, int] = {}
        for position, node in enumerate(self._nodes):
            for source in node.all_input_nodes:
                for value in tensors_of(source):
                    last_use[storage_key(value)] = position
        return last_use

    def _may_overwrite(self, node: fx.Node) -> int | None:
        """The storage a node's first result could take over, see Note [Overwriting] in `ir.py`."""
        first: Any = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or in_place_form(node.target) is None:
            return None
        value, result = first.meta["val"], tensors_of(node)[0]
        index = self._indices[storage_key(value)]
        made_by_the_step = self._drafts[index].phase is not None and index not in self._tangents
        fills_it = value.numel() * value.element_size() == value.untyped_storage().nbytes()
        is_alone = _is_read_once(node, first) and all(
            storage_key(tensor) != storage_key(value)
            for source in node.all_input_nodes
            if source is not first
            for tensor in tensors_of(source)
        )
        fits = (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
        return index if made_by_the_step and fills_it and is_alone and fits else None

    def _does_overwrite(self, node: fx.Node, position: int, storage: int | None) -> bool:
        """Whether the eager run overwrites a storage here, and nobody reads it afterwards."""
        if storage is None or isinstance(node.target, Stretch):  # which eager does not have
            return False
        first: Any = node.args[0]
        phase = Phase.BACKWARD if is_backward(node) else Phase.FORWARD
        dies_here = self._drafts[storage].phase is phase and self._last_use[storage_key(first.meta["val"])] == position
        differentiated = self._forward_targets.get(autograd_node(node))
        return dies_here and works_in_place(node, differentiated)

    def _storages(self) -> Iterator[Storage]:
        read_in_backward = {
            index for operation in self._operations if operation.phase is Phase.BACKWARD for index in operation.inputs
        }
        for index, draft in enumerate(self._drafts):
            crosses = draft.phase is Phase.FORWARD and index in read_in_backward
            yield Storage(
                name=draft.name,
                size_bytes=self._bytes_of(draft),
                kind=draft.kind or (Kind.ACTIVATION if crosses else Kind.TEMPORARY),
                dtype=str(draft.value.dtype).removeprefix("torch."),
                shape=tuple(draft.value.shape),
                module=draft.mark.module,
                source=draft.mark.source,
            )

    def _bytes_of(self, draft: _Draft) -> int:
        """Of a step on an accelerator, what is in host memory takes none of that device's."""
        is_elsewhere = self._is_on_accelerator and not is_accelerator(draft.value.device)
        return 0 if is_elsewhere else draft.value.untyped_storage().nbytes()


_PLACEHOLDER_KINDS = {
    "ParamAOTInput": Kind.PARAMETER,
    "BufferAOTInput": Kind.BUFFER,
    "PlainAOTInput": Kind.BATCH,
    "TangentAOTInput": Kind.TEMPORARY,
}
_OUTPUT_KINDS = {"GradAOTOutput": Kind.GRADIENT, "PlainAOTOutput": Kind.OUTPUT}


def _merged(operations: list[Operation], accumulations: list[Operation]) -> list[Operation]:
    """Put each accumulation behind the operation that makes the last of its inputs."""
    maker = {storage: place for place, operation in enumerate(operations) for storage in operation.outputs}
    waiting: dict[int, list[Operation]] = defaultdict(list)
    for accumulation in accumulations:
        place = _end_of_frame(operations, max(maker.get(storage, -1) for storage in accumulation.inputs))
        maker[accumulation.outputs[0]] = place
        waiting[place].append(accumulation)
    merged = list(waiting[-1])
    for place, operation in enumerate(operations):
        merged += [operation, *waiting[place]]
    return merged


def _end_of_frame(operations: list[Operation], place: int) -> int:
    """Autograd accumulates when the node that made the gradient has returned."""
    frame = operations[place].frame if place >= 0 else None
    while frame is not None and place + 1 < len(operations) and operations[place + 1].frame == frame:
        place += 1
    return place


def _is_read_once(node: fx.Node, first: fx.Node) -> bool:
    """Whether a node reads its first argument in one place; more do not matter element by element (`x.mul_(x)`)."""
    count = sum(leaf is first for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))))
    return count == 1 or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _owner(path: str) -> Mark:
    return Mark(module=path.rpartition(".")[0], source="", in_place=False)


def _trained_path(description: Any) -> str:
    target: str = getattr(getattr(description, "grad_of", None), "target", "")
    return target.removeprefix(ROOT + ".")


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What autograd compares: strides, where they matter."""
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    return tensor.dtype, tuple(tensor.shape), strides


def _flops(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return cross_entropy.flops(node.target, args)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
