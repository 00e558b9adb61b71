"""Copies move up past operations that take as long as they do, where there is room."""

import pytest

from memfit.ir import Compute, Free, Graph, Kind, Operation, Phase, Program, Storage
from memfit.plan.prefetch import brought_back_early

COPY = 4


def graph() -> Graph:
    names = ("value", "ticket", "a", "b", "c")
    storages = tuple(
        Storage(name=name, size_bytes=0 if name == "ticket" else 100, kind=Kind.ACTIVATION, dtype="f", shape=())
        for name in names
    )

    def operation(name: str, reads: tuple[int, ...], makes: int) -> Operation:
        return Operation(name=name, target=name, phase=Phase.BACKWARD, inputs=reads, outputs=(makes,))

    return Graph(
        storages=storages,
        operations=(operation("a", (), 2), operation("b", (2,), 3), operation("c", (0, 3), 4)),
        resident=(),
        tangents=(),
        held=(),
        alternatives=(operation("send", (0,), 1), operation("copy", (1,), 0)),
    )


BACKWARD = (Compute(0), Compute(1), Free(2), Compute(COPY), Free(1), Compute(2))


@pytest.mark.parametrize(
    ("room_bytes", "copy_us", "place"),
    [(1000, 2.0, 0), (1000, 1.0, 1), (1000, 0.0, 3), (250, 2.0, 1), (199, 2.0, 3), (1000, 99.0, 0)],
)
def test_a_copy_moves_as_far_as_it_is_hidden_and_fits(room_bytes: int, copy_us: float, place: int) -> None:
    program = Program(graph_digest="", forward=(), backward=BACKWARD)
    early = brought_back_early(
        graph(),
        program,
        {COPY},
        live_bytes=[200, 150, 200, 250],
        limit_bytes=room_bytes,
        time_us=[1.0, 1.0, 1.0, 1.0, copy_us],
    )
    rest = [each for each in early.backward if each != Compute(COPY)]
    assert rest == [each for each in BACKWARD if each != Compute(COPY)]
    assert early.backward.index(Compute(COPY)) == place


def test_a_copy_does_not_move_past_what_frees_or_makes_it() -> None:
    backward = (Compute(0), Free(0), Compute(COPY), Compute(2))
    early = brought_back_early(
        graph(),
        Program(graph_digest="", forward=(), backward=backward),
        {COPY},
        live_bytes=[0, 0, 0],
        limit_bytes=1000,
        time_us=[1.0] * 5,
    )
    assert early.backward == backward
