"""Recurrent layers as cuDNN runs them: one operator for all layers, with what it reserves for the backward pass.

cuDNN does not publish the size of its reserve. Per layer, direction, step and row it has to hold the activated gates
and states, which is what is counted here; see `RESERVED_VALUES` for how sure that is.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

# cuDNN's own numbers of its modes, in `aten/src/ATen/native/cudnn/RNN.cpp`.
_RELU, _TANH, _LSTM, _GRU = 0, 1, 2, 3

# Values per unit, step and row: gates, new state and what its derivative reads. Not measured; the least that the
# backward pass can do with, which a real reserve exceeds by up to a half.
RESERVED_VALUES = {_RELU: 1, _TANH: 1, _LSTM: 6, _GRU: 5}


@dataclasses.dataclass(frozen=True)
class RecurrentOperators:
    """Functions by the names of operators: in the place of composites, and as descriptions of results."""

    composites: dict[str, Callable[..., Any]]
    descriptions: dict[str, Callable[..., Any]]


@functools.cache
def recurrent_operators() -> RecurrentOperators:
    """Return all of them."""
    plain = {"gru.input": _GRU, "rnn_tanh.input": _TANH, "rnn_relu.input": _RELU}
    return RecurrentOperators(
        composites={
            "lstm.input": _lstm,
            **{name: functools.partial(_plain, mode) for name, mode in plain.items()},
        },
        descriptions={"_cudnn_rnn": _described, "_cudnn_rnn_backward": _described_backward},
    )


def _lstm(values: torch.Tensor, states: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], *rest: Any) -> Any:
    output, hidden, cell = _run(_LSTM, values, states[0], states[1], weights, *rest)
    return output, hidden, cell


def _plain(mode: int, values: torch.Tensor, state: torch.Tensor, weights: Sequence[torch.Tensor], *rest: Any) -> Any:
    return _run(mode, values, state, None, weights, *rest)[:2]


def _run(
    mode: int,
    values: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Call cuDNN's operator for all layers at once, under autocast in 16 bits (`autocast_mode`'s `_cudnn_rnn`)."""
    if torch.is_autocast_enabled("cpu") and values.is_floating_point():
        dtype = torch.get_autocast_dtype("cpu")
        values, hidden = values.to(dtype), hidden.to(dtype)
        cell = None if cell is None else cell.to(dtype)
        weights = [each.to(dtype) for each in weights]
    size = cell.size(2) if cell is not None else hidden.size(2)
    projected = hidden.size(2) if hidden.size(2) != size else 0
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    return aten._cudnn_rnn(
        values,
        weights,
        stride,
        None,
        hidden,
        cell,
        mode,
        size,
        projected,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        [],
        None,
    )[:3]


def _described(*args: Any) -> Any:
    """Describe what `_cudnn_rnn` makes, its reserve included."""
    values, weights, hidden, cell = args[0], args[1], args[4], args[5]
    mode, size, projected, layers, _, _, train, bidirectional = args[6:14]
    directions = 2 if bidirectional else 1
    output = values.new_empty((*values.shape[:2], (projected or size) * directions))
    rows = values.size(0) * values.size(1)  # of all steps
    reserved = RESERVED_VALUES[mode] * rows * size * directions * layers * values.element_size()
    return (
        output,
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else values.new_empty(0),
        values.new_empty(reserved if train else 0, dtype=torch.uint8),
        values.new_empty(sum(each.numel() for each in weights)),
    )


def _described_backward(*args: Any) -> Any:
    """Describe the gradients of what `_cudnn_rnn` is given."""
    values, weights, hidden, cell = args[0], args[1], args[4], args[5]
    return (
        torch.empty_like(values),
        torch.empty_like(hidden),
        torch.empty_like(cell) if cell is not None else values.new_empty(0),
        [torch.empty_like(each) for each in weights],
    )
