"""Answer the questions that a forward asks about its arguments, and ask them again before every later call.

Note [Questions about arguments]
    Libraries look at what they are given to take a shorter way: transformers asks whether all of a mask is one. Such an
    answer depends on the arguments alone, and not on parameters. So a trace answers it for the sample, by the operators
    that led to it, and a captured call is for arguments that answer alike: for others the model is captured anew.
    Only questions with the answers yes and no are answered so, of which there are few; a number, as the longest of
    some lengths, would be another one for most batches. A tensor that is drawn is not asked, nor one whose memory is
    written into, whatever view of it is: what is made by views has the memory of what it is made of.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from memfit import _torch
from memfit.tensors import storage_key, tensors_in

Leaves = Sequence[Any]  # of the arguments of a call
ASKED = "what the forward asks about the values of"  # what words of a change begin with
_MOST_QUESTIONS = 4  # of one call: each may double how often a model is captured


@dataclasses.dataclass(frozen=True, eq=False)
class _Given:
    """A tensor among the arguments of a call."""

    place: int  # among their leaves

    @property
    def memory(self) -> "_Source":
        """Return the source whose memory it shows."""
        return self

    def value(self, leaves: Leaves, _known: dict["_Source", Any]) -> torch.Tensor:
        tensor: torch.Tensor = leaves[self.place]
        return tensor.detach()

    def places(self) -> set[int]:
        """Return which arguments it is made of."""
        return {self.place}


@dataclasses.dataclass(frozen=True, eq=False)
class _Made:
    """A result of an operator on such tensors."""

    operator: Any
    arguments: tuple[Any, ...]  # leaves: sources, and all else as it is
    spec: Any
    place: int  # among the leaves of what the operator returns

    @property
    def memory(self) -> "_Source":
        """Return the source whose memory it shows."""
        shown = self.operator._schema.returns[min(self.place, len(self.operator._schema.returns) - 1)].alias_info
        return self if shown is None else next(each for each in self.arguments if isinstance(each, _Source)).memory

    def value(self, leaves: Leaves, known: dict["_Source", Any]) -> torch.Tensor:
        if self not in known:
            given = [each.value(leaves, known) if isinstance(each, _Source) else each for each in self.arguments]
            args, kwargs = pytree.tree_unflatten(given, self.spec)
            known[self] = pytree.tree_leaves(self.operator(*args, **kwargs))[self.place]
        result: torch.Tensor = known[self]
        return result

    def places(self) -> set[int]:
        """Return which arguments it is made of."""
        return {place for each in self.arguments if isinstance(each, _Source) for place in each.places()}


_Source = _Given | _Made


@dataclasses.dataclass(frozen=True)
class Question:
    """A question of a forward, and the answer for which a call was captured."""

    source: _Source
    answer: bool
    subject: str

    def now(self, leaves: Leaves) -> bool:
        """Ask some arguments."""
        with torch.no_grad():
            return bool(self.source.value(leaves, {}).item())


class Questions:
    """All that a forward asks, in its order."""

    def __init__(self, asked: Sequence[Question] = ()) -> None:
        self._asked = tuple(asked)

    def hold(self, leaves: Leaves) -> bool:
        """Return whether arguments of the same kind answer as those of the sample."""
        return all(each.now(leaves) == each.answer for each in self._asked)

    def change(self, leaves: Leaves) -> str:
        """Name the first answer that is another one; empty if none is."""
        for each in self._asked:
            if each.now(leaves) != each.answer:
                return f"{each.subject} was {each.answer} and is {not each.answer}"
        return ""


class Answers:
    """Answer questions about the arguments of one trace, see Note [Questions about arguments]."""

    def __init__(self, traced: Sequence[Any], own: Sequence[Any], names: Sequence[str]) -> None:
        """`traced` stand for the `own` leaves of the arguments, which have these names."""
        self._own, self._names = own, names
        self._sources: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._asked: dict[_Source, Question] = {}
        self._made: dict[Any, _Made] = {}
        shown = Counter(storage_key(each) for each in own if isinstance(each, torch.Tensor))
        for place, (one, other) in enumerate(zip(traced, own, strict=True)):
            # Of memory that is given twice, writes into one name are writes into the other.
            if isinstance(one, torch.Tensor) and _has_values(other) and shown[storage_key(other)] == 1:
                self._note(one, _Given(place))

    @property
    def questions(self) -> Questions:
        """Return what was asked so far."""
        return Questions(tuple(self._asked.values()))

    def follow(self, operator: Any, args: Any, kwargs: Any, result: Any, *, draws: bool, is_known: Any) -> None:
        """Note what an operator makes of arguments alone, and of tensors whose values are known."""
        if not any(each in self._sources for each in tensors_in((args, kwargs))):
            return
        if operator._schema.is_mutable:
            self._forget([self._sources[each] for each in _written(operator, args, kwargs) if each in self._sources])
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        sources = [self._source_of(each, is_known) if isinstance(each, torch.Tensor) else each for each in leaves]
        if draws or any(each is None for each, leaf in zip(sources, leaves, strict=True) if leaf is not None):
            return
        for place, each in enumerate(pytree.tree_leaves(result)):
            if isinstance(each, torch.Tensor):
                self._note(each, self._one(operator, tuple(sources), spec, place))

    def answer(self, tensor: torch.Tensor, line: str) -> bool | None:
        """Say what is so for the sample; None if that depends on more than arguments, or is not yes or no."""
        source = self._sources.get(tensor)
        if source is None or tensor.dtype is not torch.bool:
            return None
        if source not in self._asked:
            if len(self._asked) == _MOST_QUESTIONS:
                return None
            names = " and ".join(self._names[place] for place in sorted(source.places()))
            subject = f"{ASKED} {names} ({line})"
            with _torch.no_modes(), torch.no_grad():
                answer = bool(source.value(self._own, {}).item())
            self._asked[source] = Question(source, answer, subject)
        return self._asked[source].answer

    def _forget(self, written: Sequence[_Source]) -> None:
        """Know nothing more of what shows memory that was written into."""
        memories = {each.memory for each in written}
        for tensor, source in list(self._sources.items()):
            if source.memory in memories:
                del self._sources[tensor]

    def _source_of(self, tensor: torch.Tensor, is_known: Any) -> Any:
        source = self._sources.get(tensor)
        return is_known(tensor) if source is None else source

    def _note(self, tensor: torch.Tensor, source: _Source) -> None:
        self._sources[tensor] = source
        if hasattr(tensor, "elem"):  # what a traced tensor wraps
            self._sources[tensor.elem] = source

    def _one(self, operator: Any, arguments: tuple[Any, ...], spec: Any, place: int) -> _Made:
        """Return one source for all that is computed alike: layers ask the same again."""
        key = operator, tuple(_keys(arguments)), spec, place
        return self._made.setdefault(key, _Made(operator, arguments, spec, place))


def _keys(arguments: Sequence[Any]) -> Iterator[Any]:
    for each in arguments:
        by_identity = isinstance(each, _Source | torch.Tensor)
        yield (id(each), None) if by_identity else (type(each), repr(each))


def _written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    arguments = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return tensors_in([given.get(each.name) for each in arguments if each.is_write])


def _has_values(own: Any) -> bool:
    return type(own) is torch.Tensor and own.device.type != "meta" and not own.requires_grad
