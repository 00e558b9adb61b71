"""`torch.utils.checkpoint` on any model: find its chain of blocks, wrap runs of neighbours.

A user who checkpoints a model by hand looks for a chain: blocks of which each feeds the next and
nothing else. The same is done here from one real run. What may become one segment:

Rule 1. Blocks are the modules that containers list (`nn.Sequential`, `nn.ModuleList`), and the model's own
        children. A module with more than half of all parameters is not a block but has blocks inside.
Rule 2. Two modules are neighbours if the output of one is the first argument of the other, and nobody
        else reads it. A skip connection ends a run; so does a module that is called twice.
Rule 3. Further arguments (an attention mask) must be the same as the neighbour's, or none.
Rule 4. What has no weight matrix (normalisation, activation, pooling) belongs to the block before it.
Rule 5. The last segment stays plain, as in `checkpoint_sequential`: its backward follows at once.

Known defect of the peer, not repaired here: the forward of a segment runs twice, so BatchNorm moves its
running statistics twice a step.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True, eq=False)
class Link:
    """A module in a chain."""

    module: nn.Module
    has_extras: bool  # takes more than the output of the one before, see Rule 3


Block = list[Link]
Run = list[Block]  # of which each feeds the next and nothing else


def find_runs(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[Run]:
    """The chains of blocks in a model, from one run of `loss`."""
    calls = _recorded_calls(list(_candidates(model, _parameter_count(model) / 2)), loss)
    times = Counter(call.module for call in calls)
    runs: list[Run] = []
    before: _Call | None = None
    for call in calls:
        if times[call.module] > 1:
            before = None
            continue
        link = Link(call.module, bool(call.extras))
        if before is None or not _are_neighbours(before, call):
            runs.append([[link]])
        elif any(parameter.dim() > 1 for parameter in call.module.parameters()):
            runs[-1].append([link])
        else:
            runs[-1][-1].append(link)  # Rule 4
        before = call
    return runs


def segments(runs: Sequence[Run], blocks_each: int) -> list[Block]:
    """Runs cut into segments of so many blocks, without the very last (Rule 5)."""
    cut = [run[start : start + blocks_each] for run in runs for start in range(0, len(run), blocks_each)]
    return [[link for block in segment for link in block] for segment in cut[:-1]]


def segment_sizes(runs: Sequence[Run]) -> list[int]:
    """Blocks a segment that are worth trying: powers of two, and the square root of the longest run.

    >>> segment_sizes([[[]] * 10, [[]] * 3])
    [1, 2, 3, 4, 8]
    """
    longest = max(map(len, runs), default=1)
    powers = {2**exponent for exponent in range(longest.bit_length())}
    return sorted(powers | {square_root_size(runs)})


def square_root_size(runs: Sequence[Run]) -> int:
    return max(1, round(math.sqrt(max(map(len, runs), default=1))))


@contextlib.contextmanager
def checkpointed(wrapped: Sequence[Block]) -> Iterator[None]:
    """Each segment under one checkpoint: its first module runs all of it, the others hand through."""
    try:
        for segment in wrapped:
            forward = _segment_forward([(link.module.forward, link.has_extras) for link in segment])
            for link in segment:
                link.module.forward = forward if link is segment[0] else _hand_through
        yield
    finally:
        for segment in wrapped:
            for link in segment:
                link.module.__dict__.pop("forward", None)


def _segment_forward(steps: list[tuple[Callable[..., Any], bool]]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        (first, _), *others = steps
        value = first(*args, **kwargs)
        for forward, has_extras in others:
            value = forward(value, *args[1:], **kwargs) if has_extras else forward(value)
        return value

    return lambda *args, **kwargs: checkpoint(run, *args, use_reentrant=False, **kwargs)


def _hand_through(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _candidates(module: nn.Module, half: float) -> Iterator[nn.Module]:
    for child in module.children():
        is_container = type(child) in (nn.Sequential, nn.ModuleList)
        if is_container or (any(child.children()) and _parameter_count(child) > half):  # Rule 1
            yield from _candidates(child, half)
        else:
            yield child


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclasses.dataclass(kw_only=True)
class _Call:
    module: nn.Module
    first: Any
    extras: list[tuple[Any, Any]]  # (position or name, value)
    output: Any = None
    made_by: tuple[Any, int] | None = None  # autograd's name for the output
    readers: int = 0


def _are_neighbours(one: _Call, other: _Call) -> bool:
    is_chained = one.made_by is not None and other.first is one.output and one.readers == 1  # Rule 2
    return is_chained and (not other.extras or _same_extras(one.extras, other.extras))


def _same_extras(ones: list[tuple[Any, Any]], others: list[tuple[Any, Any]]) -> bool:
    return len(ones) == len(others) and all(
        name == other_name and (value is other or (not isinstance(value, torch.Tensor) and value == other))
        for (name, value), (other_name, other) in zip(ones, others, strict=True)
    )


def _recorded_calls(modules: list[nn.Module], loss: Callable[[], torch.Tensor]) -> list[_Call]:
    """The calls of these modules in one run, each with the number of readers of its output."""
    calls: list[_Call] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        calls.append(
            _Call(module=module, first=args[0] if args else None, extras=[*enumerate(args[1:]), *kwargs.items()])
        )
        if args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            # However often the module reads its argument, autograd then sees one reader: the clone.
            return (args[0].clone(), *args[1:]), kwargs
        return None

    def after(module: nn.Module, _args: Any, output: Any) -> None:
        call = next(call for call in reversed(calls) if call.module is module)
        call.output = output
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            call.made_by = (output.grad_fn, output.output_nr)

    with contextlib.ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        readers = _edges(loss().grad_fn)
    for call in calls:
        call.readers = readers[call.made_by]
    return calls


def _edges(root: Any) -> Counter[Any]:
    """How many nodes of the autograd graph below `root` read each output of each node."""
    counts: Counter[Any] = Counter()
    waiting, seen = [root], {root}
    while waiting:
        for edge in waiting.pop().next_functions:
            counts[edge] += 1
            if edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                waiting.append(edge[0])
    return counts
