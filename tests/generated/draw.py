"""From an integer seed to a description."""

import dataclasses
import random

from generated.build import FAMILIES, INPUTS, NO_STEP, OUTPUTS
from generated.layer import LAYERS
from generated.layers_architectures import LATER
from generated.losses import LOSSES
from generated.specs import FitSpec, LayerSpec, LoopSpec, ModelSpec, Spec

DOMAINS = ("rows", "sequence", "sequence", "tokens", "bags", "signal", "image", "image", "image", "volume")
SIZES = {"signal": (6, 32, 64), "image": (6, 12, 16), "volume": (3, 6), "sequence": (3, 12, 24), "tokens": (4, 12, 24)}
WIDE = {"signal": (64, 128), "image": (16, 24), "volume": (6, 8), "sequence": (24, 32), "tokens": (24, 32)}
LARGE = {  # batches, sizes and channels of models whose step takes megabytes
    "rows": ((512, 1024), (4,), (64, 128)),
    "bags": ((512, 1024), (8,), (64, 128)),
    "sequence": ((8, 16), (64, 96), (48, 64)),
    "tokens": ((8, 16), (64, 96), (48, 64)),
    "signal": ((8, 16), (256, 512), (16, 32)),
    "image": ((4, 8), (32, 40), (16, 32)),
    "volume": ((2, 4), (12, 16), (8, 16)),
}
EXACT = ("recompute", "lean", "offload")
ROUNDING = ("chunk", "16-bit", "8-bit", "4-bit")
_MOST_LAYERS = 6  # beside those that others hold
_MOST_COMPILED_LAYERS = 3  # each has several kernels, of which each takes seconds
_RARE = {
    "question": 0.2,
    "transformed function": 0.4,
    "adaptive softmax": 0.4,
    "experts": 0.3,
    "checkpoint": 0.5,
    "in 16 bits": 0.3,
    "to rows": 0.3,
    "no gradient": 0.4,
}
_RARE |= dict.fromkeys(LATER, 0.0)  # which `_more` adds
_OFTEN = {"convolution": 5.0, "linear": 4.0, "activation": 3.0, "norm": 3.0, "indexing": 3.0, "in place": 1.5}
_OFTEN |= {"dropout": 2.0, "attention": 3.0, "recurrent": 2.0, "arithmetic": 2.0, "relu": 2.0, "pool": 2.0}


def draw(seed: int, kernels: str = "eager") -> Spec:
    """A training run; the same for the same seed, whatever ran before."""
    assert FAMILIES  # which fill the table of layers
    rng = random.Random(seed)
    model = _model(rng, _MOST_LAYERS if kernels == "eager" else _MOST_COMPILED_LAYERS)
    return _more(Spec(seed=seed, model=model, loop=_loop(rng, model), fit=_fit(rng, kernels)))


def _more(spec: Spec) -> Spec:
    """What came to descriptions later, drawn apart, so that the models of seeds stay what they were."""
    rng = random.Random(f"{spec.seed} more")
    loop = dataclasses.replace(spec.loop, skips=rng.random() < 0.15, draws=rng.random() < 0.15)
    fit = dataclasses.replace(spec.fit, in_autocast=rng.random() < 0.5)
    model = spec.model
    domain = {"tokens": "sequence", "bags": "rows"}.get(model.domain, model.domain)
    kinds = [kind for kind in LATER if domain in LAYERS[kind].takes]
    if rng.random() < 0.2:
        kind = rng.choice(kinds)
        model = dataclasses.replace(model, layers=(LayerSpec(kind, LAYERS[kind].draw(rng)), *model.layers))
    return dataclasses.replace(spec, model=model, loop=loop, fit=fit)


def _model(rng: random.Random, most_layers: int) -> ModelSpec:
    domain = rng.choice(DOMAINS)
    amount = rng.random()
    layers, _ = _layers(
        rng, {"tokens": "sequence", "bags": "rows"}.get(domain, domain), rng.randint(1, most_layers), depth=0
    )
    batch, size, channels = _sizes(rng, domain, large=amount < 0.15, wide=amount < 0.4)
    return ModelSpec(
        domain=domain,
        batch=batch,
        size=size,
        channels=channels,
        layers=layers,
        dtype=rng.choices(("float32", "float64", "bfloat16", "float16"), (24, 3, 3, 1))[0],
        channels_last=rng.random() < 0.3,
        inputs=rng.choice(("tensor",) * 6 + ("pair",) * 3 + ("keywords",) * 3 + INPUTS[3:-1] * 2 + INPUTS[-1:]),
        outputs=rng.choice(OUTPUTS[:1] * 24 + OUTPUTS[1:5] * 12 + OUTPUTS[5:] * 6 + NO_STEP),
        tied=rng.random() < 0.5,
    )


def _sizes(rng: random.Random, domain: str, *, large: bool, wide: bool) -> tuple[int, int, int]:
    """Samples in a batch, the length of an axis, and channels."""
    if large:
        batches, sizes, channels = LARGE[domain]
        return rng.choice(batches), rng.choice(sizes), rng.choice(channels)
    batch = rng.choice((8, 16) if wide else (1, 2, 3, 4)) * (16 if domain in ("rows", "bags") else 1)
    size = rng.choice((WIDE if wide else SIZES).get(domain, (4,)))
    return batch, size, rng.choice((32, 64) if wide and domain not in ("signal", "image", "volume") else (4, 8, 16))


def _layers(rng: random.Random, domain: str, count: int, depth: int) -> tuple[tuple[LayerSpec, ...], str]:
    """Layers that take each other's domain, and the domain of the last."""
    layers = []
    for _ in range(count):
        kinds = [kind for kind, cls in LAYERS.items() if domain in cls.takes and (depth < 2 or not cls.holds_layers)]
        weights = [_RARE.get(kind, _OFTEN.get(kind, 1.0)) for kind in kinds]
        kind = rng.choices(kinds, weights)[0]
        inner: tuple[LayerSpec, ...] = ()
        after = LAYERS[kind].makes or domain
        if LAYERS[kind].holds_layers:
            inner, after = _layers(rng, domain, rng.randint(1, 3), depth + 1)
            after = domain if kind == "no gradient" else after
        layers.append(LayerSpec(kind, LAYERS[kind].draw(rng), inner))
        domain = after
    return tuple(layers), domain


def _loop(rng: random.Random, model: ModelSpec) -> LoopSpec:
    return LoopSpec(
        loss=rng.choice((*("square", "cross entropy", "smooth", "sum") * 10, *sorted(LOSSES))),
        forwards=rng.choice((1, 1, 1, 2)),
        accumulated=rng.choice((1, 1, 1, 2)),
        set_to_none=rng.random() < 0.7,
        autocast=model.dtype == "float32" and rng.random() < 0.15,
        partial=rng.random() < 0.1,
        evaluated=rng.random() < 0.1,
        one_output=rng.random() < 0.2,
    )


def _fit(rng: random.Random, kernels: str) -> FitSpec:
    allow = tuple(each for each in EXACT if rng.random() < 0.75) or ("recompute",)
    if rng.random() < 0.2:
        allow = (*allow, rng.choice(ROUNDING))
    return FitSpec(
        budget=rng.choice((0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.0, 0.0)),
        allow=allow,
        kernels=kernels,
        outside_loss=rng.random() < 0.85,
    )
