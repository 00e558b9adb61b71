"""The output of BatchNorm made again from its input and the statistics it kept.

The operator reads its input twice: once for mean and variance, once to normalise. Both statistics
are kept for the backward anyway, so the second reading is enough to make the output again.

Note [The same arithmetic]
    On CPU the operator computes alpha = invstd * weight, beta = bias - mean * alpha and
    input * alpha + beta, in training and in evaluation by the same code. In evaluation invstd
    is 1 / sqrt(running_var + eps): with a variance of 1 and an eps of 0 that is 1, so with
    alpha in the place of the weight the same numbers come out, to the last bit.
"""

from collections.abc import Iterator
from typing import Any

import torch

from memfit.ops.lean import Alternative, LeanOperator, Site, is_worth_it, value_of

aten = torch.ops.aten


def normalize(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> torch.Tensor:
    """What BatchNorm made of `values` with these statistics, see Note [The same arithmetic]."""
    mean, scale = _as_computed_with(mean), _as_computed_with(inverse_deviation)
    if weight is not None:
        scale = scale * _as_computed_with(weight)
    bias = None if bias is None else _as_computed_with(bias)
    ones = torch.ones_like(mean)
    result: torch.Tensor = aten.native_batch_norm(values, scale, bias, mean, ones, False, 0.0, 0.0)[0]
    return result


def _as_computed_with(parameter: torch.Tensor) -> torch.Tensor:
    """Parameters of half precision are computed with in single precision."""
    return parameter.float() if parameter.element_size() == 2 else parameter


def _alternatives(site: Site) -> Iterator[Alternative]:
    operator = site.node
    if operator.target not in _TRAINING:
        return
    args: Any = operator.args
    values, weight, bias, *rest = args
    picked = {user.args[1]: user for user in operator.users}
    value = value_of(values)
    if value is None or value.device.type != "cpu" or not _TRAINING[operator.target](rest):
        return
    output, mean, inverse_deviation = (picked.get(place) for place in range(3))
    result = value_of(output)
    if output is None or mean is None or inverse_deviation is None or result is None or not is_worth_it(result):
        return
    yield Alternative(function=normalize, args=(values, weight, bias, mean, inverse_deviation), of=output)


# Operators that normalise with the statistics of the batch, and whether these arguments ask for that.
_TRAINING: dict[Any, Any] = {
    aten._native_batch_norm_legit_functional.default: lambda rest: rest[2],
    aten._native_batch_norm_legit.no_stats: lambda rest: rest[0],
    aten.native_batch_norm.default: lambda rest: rest[2],
}


BATCH_NORM = LeanOperator(
    name="batch_norm",
    technique="lean",
    keeps="nothing more: the output is made again from the input and the statistics kept for the backward",
    exact=True,
    functions=(normalize,),
    alternatives=_alternatives,
)
