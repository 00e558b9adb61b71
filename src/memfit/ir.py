"""The one representation: what a training step computes, and in what order.

A `Graph` says what there is: storages (memory that is allocated and freed as a whole) and
operations (what reads storages and makes new ones). A `Program` says what happens: a
straight line of instructions over a graph, decided before it runs. Both are plain frozen
data without torch, written and read as versioned JSON.

Note [Values are storages]
    Memory is freed by storage, not by tensor. Views, detached aliases and reshapes of one
    storage are one value here, so an operation that only makes a view does not appear.

Note [Overwriting]
    An operation that works in place (`relu_`) is written as an operation with a fresh output
    and `overwrites` naming the input storage whose memory the output takes over. That input
    is dead afterwards: nothing reads it again. `may_overwrite` names the input that could be
    taken over by the same operator in place, whether or not the eager run does so. A program
    says at each run whether it happens (`Compute.in_place`).

Note [Alternatives]
    Other ways to get what the model's own operations make, for planners to choose from. They
    follow the operations in numbering: `Compute(len(operations) + 2)` runs the third alternative.
    One in the forward phase either makes a smaller form of a value (a new storage: dropout's mask
    in bits), run right after the value is first made, or makes an existing value again (from its
    smaller form, or by a cheaper operator). One in the backward phase makes exactly the
    outputs of one of the model's own operations, from other inputs. The plain run knows none.

Note [Frames]
    In the eager run, one node of autograd computes the backward of one forward operator with
    several operations. What it reads and what it makes on the way is released when the node
    returns, not after its last use. Neighbouring operations of one node share a `frame`.

Note [Checkpoints]
    A model may call `torch.utils.checkpoint` itself. The graph looks through it: every operation
    appears once, and those of one checkpointed call, forward and backward, share a number. The
    eager run computes the forward ones again; only its program (`plan/identity.py`) shows that.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Self

from memfit.errors import InvalidFile
from memfit.files import parse_json

GRAPH_FORMAT = "memfit.graph"
PROGRAM_FORMAT = "memfit.program"
FORMAT_VERSION = 1

GENERATOR_STATE_BYTES = 5056  # of torch's generator on a CPU; a plan keeps it for each draw that is made again
ACCUMULATE = "memfit.accumulate"  # target of what autograd itself does to make a parameter's gradient


class Kind(StrEnum):
    """Why a storage is in memory."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    OPTIMIZER = "optimizer state"
    GRADIENT = "gradient"  # of a parameter, from the moment it exists
    OUTPUT = "output"  # returned by the model, held by its caller until the step ends
    ACTIVATION = "activation"  # made in the forward pass and read in the backward pass
    TEMPORARY = "temporary"  # made and dropped within one pass
    WORKSPACE = "workspace"  # allocated inside an operator and gone when it returns


class Phase(StrEnum):
    """Which pass an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """A piece of memory that is allocated and freed as a whole."""

    name: str  # the parameter's or buffer's path, or the operation's own name for the value
    size_bytes: int
    kind: Kind
    dtype: str  # of the first tensor that lives in it
    shape: tuple[int, ...]
    module: str = ""  # path of the module that made it: "layer3.4.conv2"
    source: str = ""  # line of the user's code that made it: "resnet.py:143"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operator call that reads storages and makes new ones."""

    name: str  # unique in its graph
    target: str  # the operator: "aten.convolution.default"
    phase: Phase
    inputs: tuple[int, ...]  # storages read, by index into Graph.storages
    outputs: tuple[int, ...]  # storages made
    overwrites: int | None = None  # see Note [Overwriting]
    may_overwrite: int | None = None
    signature: str = ""  # equal signatures cost the same: operator, shapes, strides, dtypes, constants
    flops: int = 0
    random: bool = False  # draws from a generator
    frame: int | None = None  # see Note [Frames]
    checkpoint: int | None = None  # see Note [Checkpoints]
    technique: str = ""  # of an alternative: the name of what it does, "bits", see Note [Alternatives]
    module: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """What one forward and backward pass computes, in the order of the plain eager run."""

    storages: tuple[Storage, ...]
    operations: tuple[Operation, ...]
    resident: tuple[int, ...]  # storages that exist before the step: parameters, buffers, batch
    tangents: tuple[int, ...]  # storages handed in when the backward pass starts
    held: tuple[int, ...]  # storages alive when the backward pass ends: outputs, gradients
    written_back: tuple[int, ...] = ()  # new values of buffers, copied into them when the forward ends
    trained: tuple[tuple[int, int], ...] = ()  # (parameter, its gradient)
    alternatives: tuple[Operation, ...] = ()  # see Note [Alternatives]

    def operation(self, index: int) -> Operation:
        """The operation or alternative that an instruction names."""
        count = len(self.operations)
        return self.operations[index] if index < count else self.alternatives[index - count]

    def takes_over(self, operation: Operation) -> int | None:
        """Return the storage that an operation may write its result over; None if they differ in size.

        Some operators leave a small result in a big storage (`mse_loss` that of all terms). What is written over it
        would keep that alive.
        """
        taken = operation.may_overwrite
        if taken is None or self.storages[taken].size_bytes != self.storages[operation.outputs[0]].size_bytes:
            return None
        return taken

    def overwritable(self) -> frozenset[str]:
        """Operations and alternatives whose `may_overwrite` nobody reads later in the plain run, by name."""
        last_read = {index: place for place, each in enumerate(self.operations) for index in each.inputs}
        makers = {index: place for place, each in enumerate(self.operations) for index in each.outputs}
        lasting = {*self.resident, *self.held, *self.tangents, *self.written_back}
        return frozenset(
            each.name
            for each in (*self.operations, *self.alternatives)
            if each.may_overwrite is not None
            and each.may_overwrite not in lasting
            and last_read[each.may_overwrite] == makers.get(each.outputs[0])
        )

    @property
    def returned_alone(self) -> tuple[int, ...]:
        """Outputs that no operation reads: they are in memory for the caller alone."""
        read = {storage for each in (*self.operations, *self.alternatives) for storage in each.inputs}
        return tuple(each for each in self.held if self.storages[each].kind is Kind.OUTPUT and each not in read)

    @property
    def output_bytes(self) -> int:
        """Of all outputs."""
        return sum(self.storages[each].size_bytes for each in self.held if self.storages[each].kind is Kind.OUTPUT)

    def digest(self) -> str:
        """A short hash that graphs of the same computation share, whatever lines and machines they come from.

        Names, source lines, and the sizes of what only a device knows are left out.
        """
        operations = [
            (each.target, each.phase, each.inputs, each.outputs, each.overwrites, each.may_overwrite, each.technique)
            for each in (*self.operations, *self.alternatives)
        ]
        storages = [(each.kind, each.dtype, each.shape, each.module) for each in self.storages]
        ends = [self.resident, self.tangents, self.held, self.written_back, self.trained, len(self.operations)]
        return hashlib.sha256(json.dumps([operations, storages, ends]).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return _dump(GRAPH_FORMAT, dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = _load(GRAPH_FORMAT, text)
        with _reading("graph"):
            graph = cls(
                storages=tuple(_storage(each) for each in fields["storages"]),
                operations=tuple(_operation(each) for each in fields["operations"]),
                resident=tuple(fields["resident"]),
                tangents=tuple(fields["tangents"]),
                held=tuple(fields["held"]),
                written_back=tuple(fields["written_back"]),
                trained=tuple((parameter, gradient) for parameter, gradient in fields["trained"]),
                alternatives=tuple(_operation(each) for each in fields["alternatives"]),
            )
            _check_indices(graph)
            return graph


BlockEvent = tuple[int, int]  # a number, and bytes: taken if positive, released if negative


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerBlocks:
    """What an optimizer takes and releases block by block, in its order.

    A number names a block of the same step. One that is released and was not taken in its step is state of an earlier
    one; what is taken and not released becomes state.
    """

    first_step: tuple[BlockEvent, ...]
    later_step: tuple[BlockEvent, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps, and what it allocates and releases while it steps.

    The state of an optimizer that calls a closure is all that it holds while the closure runs.
    """

    state_bytes: int = 0  # live before a step, beside parameters and gradients
    workspace_bytes: int = 0  # the highest rise in a step above parameters, gradients and state
    changes_bytes: tuple[int, ...] = ()  # from one new highest or lowest level of a step to the next, then to its end
    blocks: OptimizerBlocks | None = dataclasses.field(default=None, compare=False)  # None: only sums are known


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossMemory:
    """Describe a loss that the caller computes between the two passes, see Note [Loss outside].

    Note [Loss outside]
        In `F.cross_entropy(model(x), y).backward()` the loss is no part of the model. It runs when the forward pass has
        ended, beside everything that is kept for the backward pass, and ends when the gradients of the model's outputs
        are there. Outputs that nobody else reads are the caller's alone: they go when the caller lets them go.
    """

    working_bytes: int  # the highest rise above what lives when the forward pass ends
    lasting_bytes: (
        int  # live from the start of the backward pass on: outputs that are held, gradients of the loss's own
    )
    batch_bytes: int  # live all along: of the batch, what the model is not given
    output_bytes: int  # of the outputs that it was found for
    starts: tuple[tuple[int, ...] | None, ...] = ()  # how gradients of outputs come, see `capture/gradient_layouts.py`

    def scaled(self, output_bytes: int) -> "LossMemory":
        """About what the same loss takes for outputs of another size."""
        if output_bytes == self.output_bytes or not self.output_bytes:
            return self
        share = output_bytes / self.output_bytes
        return LossMemory(
            working_bytes=math.ceil(self.working_bytes * share),
            lasting_bytes=math.ceil(self.lasting_bytes * share),
            batch_bytes=math.ceil(self.batch_bytes * share),
            output_bytes=output_bytes,
            starts=self.starts,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Run an operation, the first time or again."""

    operation: int  # or an alternative, see `Graph.operation`
    in_place: bool = False  # its output takes over the memory of its `may_overwrite`


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Drop a storage."""

    storage: int


Instruction = Compute | Free


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a step does, in order. Nothing is decided while it runs."""

    graph_digest: str
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]

    def to_json(self) -> str:
        return _dump(
            PROGRAM_FORMAT,
            {
                "graph_digest": self.graph_digest,
                "forward": [_instruction_to_data(each) for each in self.forward],
                "backward": [_instruction_to_data(each) for each in self.backward],
            },
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = _load(PROGRAM_FORMAT, text)
        with _reading("program"):
            return cls(
                graph_digest=fields["graph_digest"],
                forward=tuple(_instruction(each) for each in fields["forward"]),
                backward=tuple(_instruction(each) for each in fields["backward"]),
            )


def without_prefix(graph: Graph, prefix: str) -> Graph:
    """The graph of a wrapped module, with paths as they are without the wrapper."""

    def shorter(path: str) -> str:
        return "" if path == prefix else path.removeprefix(prefix + ".")

    return dataclasses.replace(
        graph,
        storages=tuple(
            dataclasses.replace(each, name=shorter(each.name), module=shorter(each.module)) for each in graph.storages
        ),
        operations=tuple(dataclasses.replace(each, module=shorter(each.module)) for each in graph.operations),
        alternatives=tuple(dataclasses.replace(each, module=shorter(each.module)) for each in graph.alternatives),
    )


def _dump(format_name: str, fields: Mapping[str, Any]) -> str:
    header = {"format": format_name, "version": FORMAT_VERSION}
    return json.dumps(header | dict(fields), sort_keys=True, separators=(",", ":"))


def _load(format_name: str, text: str) -> dict[str, Any]:
    try:
        fields = parse_json(text)
    except ValueError as error:
        raise InvalidFile(f"not a {format_name} file: it is not whole JSON ({error})") from None
    if not isinstance(fields, dict) or fields.get("format") != format_name:
        found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise InvalidFile(f"not a {format_name} file: its format is {found!r}")
    version = fields.get("version")
    if version != FORMAT_VERSION:
        raise InvalidFile(
            f"a {format_name} file of version {version!r} was found, this memfit reads version "
            f"{FORMAT_VERSION}; write the file again, or install the memfit that wrote it"
        )
    return fields


@contextlib.contextmanager
def _reading(noun: str) -> Iterator[None]:
    """Give one name to everything that can be wrong inside a file of ours."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InvalidFile(f"damaged {noun}: {type(error).__name__}: {error}; write the file again") from None


def _storage(fields: dict[str, Any]) -> Storage:
    size_bytes = fields["size_bytes"]
    if type(size_bytes) is not int or size_bytes < 0:
        raise ValueError(f"a storage of {size_bytes!r} bytes")
    if not all(type(size) is int for size in fields["shape"]):
        raise ValueError(f"a storage of shape {fields['shape']!r}")
    return Storage(**fields | {"kind": Kind(fields["kind"]), "shape": tuple(fields["shape"])})


def _operation(fields: dict[str, Any]) -> Operation:
    tuples = {"inputs": tuple(fields["inputs"]), "outputs": tuple(fields["outputs"])}
    return Operation(**fields | tuples | {"phase": Phase(fields["phase"])})


def _check_indices(graph: Graph) -> None:
    count = len(graph.storages)
    named = [*graph.resident, *graph.tangents, *graph.held, *graph.written_back]
    named += [index for pair in graph.trained for index in pair]
    for operation in (*graph.operations, *graph.alternatives):
        named += [*operation.inputs, *operation.outputs]
        named += [each for each in (operation.overwrites, operation.may_overwrite) if each is not None]
    for index in named:
        if not isinstance(index, int) or not 0 <= index < count:
            raise ValueError(f"storage {index!r} of {count}")


_INSTRUCTIONS: dict[str, type[Compute] | type[Free]] = {"compute": Compute, "free": Free}
_INSTRUCTION_NAMES = {cls: name for name, cls in _INSTRUCTIONS.items()}


def _instruction_to_data(instruction: Instruction) -> list[Any]:
    return [_INSTRUCTION_NAMES[type(instruction)], *dataclasses.astuple(instruction)]


def _instruction(data: list[Any]) -> Instruction:
    name, index, *flags = data
    if type(index) is not int or index < 0 or not all(type(flag) is bool for flag in flags):
        raise ValueError(f"instruction {data!r}")
    return _INSTRUCTIONS[name](index, *flags)
