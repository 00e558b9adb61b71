"""The smallest description that still fails in the same way, and a script of its own for it."""

import dataclasses
import inspect
from collections.abc import Iterator

from generated import build, compiled, exact, layer, loops, losses, oracle, specs
from generated.layer import LAYERS
from generated.oracle import Outcome, outcome_of
from generated.specs import FitSpec, LayerSpec, LoopSpec, ModelSpec, Spec

_MOST_RUNS = 300


def shrink(spec: Spec, outcome: Outcome) -> Spec:
    """Take away what is not needed for the failure, until nothing can be taken away."""
    runs = 0
    found = True
    while found:
        found = False
        for smaller in _smaller(spec):
            runs += 1
            if runs > _MOST_RUNS:
                return spec
            if outcome_of(smaller).signature == outcome.signature:
                spec, found = smaller, True
                break
    return spec


def _smaller(spec: Spec) -> Iterator[Spec]:
    """Simpler descriptions, those that take away most first."""
    for layers in _fewer(spec.model.layers):
        yield dataclasses.replace(spec, model=dataclasses.replace(spec.model, layers=layers))
    for field in dataclasses.fields(LoopSpec):
        if getattr(spec.loop, field.name) != field.default:
            yield dataclasses.replace(spec, loop=dataclasses.replace(spec.loop, **{field.name: field.default}))
    for name in ("dtype", "channels_last", "inputs", "outputs", "tied"):
        default = getattr(ModelSpec(), name)
        if getattr(spec.model, name) != default:
            yield dataclasses.replace(spec, model=dataclasses.replace(spec.model, **{name: default}))
    for name in ("batch", "size", "channels"):
        number = getattr(spec.model, name)
        if number > 1:
            yield dataclasses.replace(spec, model=dataclasses.replace(spec.model, **{name: number // 2}))
    yield from _simpler_fits(spec)
    for layers in _plainer(spec.model.layers):
        yield dataclasses.replace(spec, model=dataclasses.replace(spec.model, layers=layers))


def _simpler_fits(spec: Spec) -> Iterator[Spec]:
    for field in dataclasses.fields(FitSpec):
        if field.name != "allow" and getattr(spec.fit, field.name) != field.default:
            yield dataclasses.replace(spec, fit=dataclasses.replace(spec.fit, **{field.name: field.default}))
    for technique in spec.fit.allow if len(spec.fit.allow) > 1 else ():
        allow = tuple(each for each in spec.fit.allow if each != technique)
        yield dataclasses.replace(spec, fit=dataclasses.replace(spec.fit, allow=allow))


def _fewer(layers: tuple[LayerSpec, ...]) -> Iterator[tuple[LayerSpec, ...]]:
    """Without one layer, with one layer's insides in its place, or with fewer insides."""
    for place, each in enumerate(layers):
        before, after = layers[:place], layers[place + 1 :]
        yield (*before, *after)
        if each.inner:
            yield (*before, *each.inner, *after)
            for inner in _fewer(each.inner):
                yield (*before, dataclasses.replace(each, inner=inner), *after)


def _plainer(layers: tuple[LayerSpec, ...]) -> Iterator[tuple[LayerSpec, ...]]:
    """With one option of one layer switched off, or shorter."""
    for place, each in enumerate(layers):
        for name, value in each.options.items():
            if value is True or (isinstance(value, list) and len(value) > 1):
                others = [False] if value is True else [value[:-1], value[1:]]
                for other in others:
                    options = {**each.options, name: other}
                    yield (*layers[:place], dataclasses.replace(each, options=options), *layers[place + 1 :])
        for inner in _plainer(each.inner):
            yield (*layers[:place], dataclasses.replace(each, inner=inner), *layers[place + 1 :])


# As a script

_HEAD = '''"""A generated model that fails, by itself; needs torch and memfit alone."""

import contextlib
import dataclasses
import json
import math
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import memfit
from memfit import ways
from memfit.capture import runs
from memfit.ops.stretch import Stretch
from memfit.measure.peak import measure_peak
'''


def script_of(spec: Spec) -> str:
    """The source of the layers that are needed, of the loop and of the comparison, and the description."""
    kinds = set(_kinds(spec.model.layers))
    modules = {inspect.getmodule(LAYERS[kind]) for kind in kinds}
    families = sorted((each for each in modules if each is not None), key=lambda each: each.__name__)
    sources = [_own_source(each) for each in (specs, layer, losses, *families, build, loops, compiled, exact, oracle)]
    rounding = 'ROUNDING = ("chunk", "16-bit", "8-bit", "4-bit")'
    end = f"SPEC = Spec.from_json({spec.to_json()!r})\nprint(outcome_of(SPEC))"
    return "\n\n".join([_HEAD, rounding, *sources, end])


def _kinds(layers: tuple[LayerSpec, ...]) -> Iterator[str]:
    for each in layers:
        yield each.kind
        yield from _kinds(each.inner)


def _own_source(module: object) -> str:
    """A module's source without its docstring, its imports and what names other families."""
    lines = inspect.getsource(module).splitlines()  # type: ignore[arg-type]
    start = next(number for number, line in enumerate(lines) if line.startswith("import ") or line.startswith("from "))
    kept, inside = [], False
    for line in lines[start:]:
        if inside or line.startswith(("import ", "from ", "FAMILIES")):
            inside = line.endswith("(") or (inside and line != ")")
        else:
            kept.append(line)
    return "\n".join(kept).strip()
