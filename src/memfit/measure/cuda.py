"""What a graph captured on another device would be on CUDA."""

import dataclasses

from memfit.ir import Graph

_DRAW = "aten.bernoulli.p"


def with_byte_masks(graph: Graph) -> Graph:
    """Count the masks of dropout with one byte a value: CUDA's kernel keeps them as bool.

    On CPU dropout draws ones and zeros in the values' own dtype and scales them in place.
    """
    storages = list(graph.storages)
    masks: set[int] = set()
    for operation in graph.operations:
        draws = operation.target == _DRAW
        scales = operation.overwrites in masks
        if draws or scales:
            masks.update(operation.outputs)
            masks.update(() if operation.overwrites is None else (operation.overwrites,))
    for index in masks:
        values = 1
        for size in storages[index].shape:
            values *= size
        storages[index] = dataclasses.replace(storages[index], size_bytes=values, dtype="bool")
    return dataclasses.replace(graph, storages=tuple(storages))
