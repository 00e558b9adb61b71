"""Why bytes are live, as reports draw it: names, order and colours, for pages, pictures and notebooks alike.

Note [Colours]
    What lives through the whole step is grey and blue-grey: it is not what a plan decides about. What comes and goes
    has hues that people who do not see red or green tell apart (blue-green, orange, sand, purple), neighbours in the
    stack differ in lightness too, and every drawing has its words beside it.
"""

from enum import StrEnum

from memfit.ir import Kind


class Shade(StrEnum):
    """A band of the drawing, from the bottom of the stack to its top."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    OPTIMIZER = "optimizer state"
    BATCH = "batch"
    GRADIENT = "gradients"
    OUTPUT = "outputs"
    ACTIVATION = "activations kept"
    AGAIN = "computed again"
    TEMPORARY = "temporaries"
    WORKSPACE = "workspaces"


SHADES = tuple(Shade)
_OF_KIND = {
    Kind.PARAMETER: Shade.PARAMETER,
    Kind.BUFFER: Shade.BUFFER,
    Kind.OPTIMIZER: Shade.OPTIMIZER,
    Kind.BATCH: Shade.BATCH,
    Kind.GRADIENT: Shade.GRADIENT,
    Kind.OUTPUT: Shade.OUTPUT,
    Kind.ACTIVATION: Shade.ACTIVATION,
    Kind.TEMPORARY: Shade.TEMPORARY,
    Kind.WORKSPACE: Shade.WORKSPACE,
}

LIGHT = {
    "page": "#f7f7f5",
    "card": "#ffffff",
    "ink": "#1d2129",
    "soft": "#5d6573",
    "line": "#e2e4e8",
    "grid": "#e9ebee",
    "accent": "#1f5fbf",
    "budget": "#b0262b",
    "good": "#0f6b4f",
    "good-back": "#e0f2ec",
    "parameter": "#4b5a70",
    "buffer": "#66758b",
    "optimizer": "#8794a8",
    "batch": "#b4bdca",
    "gradient": "#8a6fb3",
    "output": "#6fa3d0",
    "activation": "#1f968b",
    "again": "#e5812b",
    "temporary": "#e8c468",
    "workspace": "#c2a2b4",
}

DARK = {
    "page": "#14161a",
    "card": "#1c1f25",
    "ink": "#e8eaee",
    "soft": "#a0a8b5",
    "line": "#30353e",
    "grid": "#272b33",
    "accent": "#86b4ff",
    "budget": "#ff8a80",
    "good": "#7fdcbb",
    "good-back": "#14352b",
    "parameter": "#5f6f88",
    "buffer": "#76869e",
    "optimizer": "#909db1",
    "batch": "#b9c2cf",
    "gradient": "#a48ad0",
    "output": "#7fb2de",
    "activation": "#2fae9f",
    "again": "#f0923e",
    "temporary": "#ecd084",
    "workspace": "#cdaec0",
}


def shade_of(kind: Kind, *, is_again: bool) -> Shade:
    """Where a value is drawn; what the forward pass made and the backward pass makes again is a shade of its own."""
    if is_again and kind in (Kind.ACTIVATION, Kind.TEMPORARY, Kind.OUTPUT):
        return Shade.AGAIN
    return _OF_KIND[kind]


def slug(shade: Shade) -> str:
    """The name of a shade's colour.

    >>> slug(Shade.AGAIN), LIGHT[slug(Shade.AGAIN)]
    ('again', '#e5812b')
    """
    return shade.name.lower()
