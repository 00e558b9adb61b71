"""An estimate made by hand, without a model."""

from memfit.estimate import Estimate, ParameterCount
from memfit.ir import Graph, Kind, Operation, OptimizerMemory, Phase, Storage
from memfit.plan.identity import identity_program
from memfit.plan.simulate import simulate

KIB = 2**10


def _storage(name: str, size_bytes: int, kind: Kind, module: str = "", source: str = "") -> Storage:
    return Storage(
        name=name,
        size_bytes=size_bytes,
        kind=kind,
        dtype="float32",
        shape=(size_bytes // 4,),
        module=module,
        source=source,
    )


def chain(modules: list[str]) -> Graph:
    """One operation a module forward, each keeping 4 KiB, and one backward that makes a gradient of 1 KiB."""
    count = len(modules)
    storages = [_storage("x", 2 * KIB, Kind.BATCH)]
    storages += [_storage(f"{module}.weight", KIB, Kind.PARAMETER, module) for module in modules]
    storages += [_storage(f"act_{i}", 4 * KIB, Kind.ACTIVATION, m, f"net.py:{i}") for i, m in enumerate(modules)]
    storages += [_storage(f"grad_{i}", KIB, Kind.GRADIENT, m, f"net.py:{i}") for i, m in enumerate(modules)]
    operations = [
        Operation(
            name=f"forward_{i}",
            target="aten.mm",
            phase=Phase.FORWARD,
            inputs=(count + i if i else 0, 1 + i),
            outputs=(1 + count + i,),
            module=module,
        )
        for i, module in enumerate(modules)
    ]
    operations += [
        Operation(
            name=f"backward_{i}",
            target="aten.mm",
            phase=Phase.BACKWARD,
            inputs=(1 + count + i,),
            outputs=(1 + 2 * count + i,),
            module=modules[i],
        )
        for i in reversed(range(count))
    ]
    return Graph(
        storages=tuple(storages),
        operations=tuple(operations),
        resident=tuple(range(1 + count)),
        tangents=(),
        held=tuple(range(1 + 2 * count, 1 + 3 * count)),
        trained=tuple((1 + i, 1 + 2 * count + i) for i in range(count)),
    )


def make_estimate(
    modules: list[str], *, state_bytes: int = 3 * KIB, model: str = "Net", notes: tuple[str, ...] = ()
) -> Estimate:
    """An estimate of a chain of modules, without torch."""
    graph = chain(modules)
    optimizer = OptimizerMemory(state_bytes=state_bytes)
    return Estimate(
        model=model,
        optimizer="sgd" if state_bytes else None,
        device="cpu",
        graph=graph,
        timeline=simulate(graph, identity_program(graph), optimizer=optimizer),
        parameters=(
            ParameterCount(dtype="float32", trainable=True, count=1000, size_bytes=4000),
            ParameterCount(dtype="bfloat16", trainable=False, count=50, size_bytes=100),
        ),
        workspaces_measured=False,
        notes=notes,
    )
