"""What was measured of a step when its plans were made: bytes that a trace alone does not know.

Note [Stored sizes]
    What operators allocate inside, and how big some of their results are, depends on processor and number of threads.
    To check the peak of a plan to the byte on any machine, the figures it was made with are stored beside it.
"""

import dataclasses
import json
from typing import Self

from memfit.errors import InvalidFile, first_line
from memfit.ir import Graph
from memfit.prepare import Prepared

FORMAT = "memfit.zoo.sizes"
VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Measured bytes of one step, by number in its graph."""

    storage_bytes: tuple[int, ...]  # by storage
    workspace_bytes: tuple[int, ...]  # by operation, then by alternative

    @classmethod
    def of(cls, prepared: Prepared) -> Self:
        return cls(
            storage_bytes=tuple(each.size_bytes for each in prepared.graph.storages),
            workspace_bytes=tuple(prepared.costs.workspace_bytes),
        )

    def fits(self, graph: Graph) -> bool:
        """Whether the figures can be of this graph."""
        operations = len(graph.operations) + len(graph.alternatives)
        return (len(graph.storages), operations) == (len(self.storage_bytes), len(self.workspace_bytes))

    def applied(self, graph: Graph) -> Graph:
        """The graph with the sizes that were measured."""
        pairs = zip(graph.storages, self.storage_bytes, strict=True)
        return dataclasses.replace(
            graph, storages=tuple(dataclasses.replace(each, size_bytes=size) for each, size in pairs)
        )

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION} | dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            content = json.loads(text)
            if (content["format"], content["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {content['format']!r} of version {content['version']!r}")
            return cls(
                storage_bytes=tuple(map(int, content["storage_bytes"])),
                workspace_bytes=tuple(map(int, content["workspace_bytes"])),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidFile(f"damaged sizes of a step: {first_line(error)}; install again") from None
