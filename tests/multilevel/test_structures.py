"""Other structures than one above one: several lowers, frozen parts, batches that are dicts."""

from typing import Any

import pytest
import torch
from quadratics import DIMENSION, bilevel, hypergradient, normal, positive, written
from torch import nn

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem
from memfit.multilevel.dependencies import Dependencies

UPPER = normal(3, seed=4)
CG = Config(type="cg", cg_iterations=2 * DIMENSION)


def test_several_lowers_each_have_their_part() -> None:
    matrices = [positive(seed=seed) for seed in (1, 2)]
    couplings = [normal(DIMENSION, 3, seed=seed) for seed in (3, 5)]

    def response(u: torch.Tensor, number: int) -> torch.Tensor:
        return torch.linalg.solve(matrices[number], couplings[number] @ u)

    u = UPPER.clone().requires_grad_()
    (reference,) = torch.autograd.grad((response(u, 0) * response(u, 1)).sum(), u)
    upper = written("upper", UPPER, lambda p, _: (p.left() * p.right()).sum())
    lowers = [
        written(
            name,
            response(UPPER, number),
            lambda p, _, n=number: 0.5 * p() @ matrices[n] @ p() - (couplings[n] @ p.upper()) @ p(),
            CG,
        )
        for number, name in enumerate(("left", "right"))
    ]
    dependencies = {"u2l": {upper: lowers}, "l2u": {lower: [upper] for lower in lowers}}
    found = hypergradient([upper, *lowers], dependencies, upper)
    assert float((found - reference).norm() / reference.norm()) <= 1e-8


def test_an_upper_waits_for_its_slowest_lower() -> None:
    def near(p: Any, _batch: Any) -> torch.Tensor:
        return (p() - p.upper()).square().sum()

    upper = written("upper", UPPER, lambda p, _: (p.fast() * p.slow()).sum())
    fast = written("fast", UPPER, near, Config(unroll_steps=1), rate=0.1)
    slow = written("slow", UPPER, near, Config(unroll_steps=3), rate=0.1)
    dependencies = {"u2l": {upper: [fast, slow]}, "l2u": {fast: [upper], slow: [upper]}}
    engine = Engine([upper, fast, slow], EngineConfig(train_iters=7), dependencies)
    engine.run()
    assert (fast.count, slow.count, upper.count) == (7, 7, 2)


def test_frozen_parameters_stay_frozen_and_out_of_the_hypergradient() -> None:
    class Tuned(ImplicitProblem):
        def training_step(self, batch: Any) -> torch.Tensor:
            return (self(batch["x"]) - self.upper() * batch["y"]).square().mean()

    network = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)).double()
    network[0].requires_grad_(False)
    kept = network[0].weight.detach().clone()
    batch = {"x": normal(6, 2, seed=1), "y": normal(6, 1, seed=2)}
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)
    lower = Tuned("lower", Config(type="cg", cg_damping=0.1), network, optimizer, None, [batch])
    upper = written("upper", UPPER[:1], lambda p, b: p.lower(b["x"]).square().mean(), rate=0.1, batches=[batch])
    engine = Engine([upper, lower], EngineConfig(train_iters=3), bilevel(upper, lower))
    engine.run()
    assert torch.equal(network[0].weight, kept)
    assert not network[0].weight.requires_grad
    assert not torch.equal(upper.module.values, UPPER[:1])


def routes(names: str, u2l: dict[str, list[str]], l2u: dict[str, list[str]], top: str) -> list[tuple[str, list[str]]]:
    problems = [written(name, UPPER, lambda p, _: p().sum(), CG) for name in names]
    engine = Engine(problems, None, {"u2l": u2l, "l2u": l2u})
    route = engine.routes[engine.dependencies._by_name[top]]
    return [(leg.through.name, [other.name for other in leg.onto]) for leg in route.legs]


@pytest.mark.parametrize(
    ("names", "u2l", "l2u", "expected"),
    [
        ("ab", {"a": ["b"]}, {"b": ["a"]}, [("b", ["a"])]),
        ("ab", {"a": ["b"]}, {}, []),
        ("ab", {}, {"b": ["a"]}, []),
        ("abc", {"a": ["b"], "b": ["c"]}, {"c": ["a"]}, [("c", ["b"]), ("b", ["a"])]),
        ("abc", {"a": ["c"]}, {"c": ["b"], "b": ["a"]}, [("b", ["c"]), ("c", ["a"])]),
        (
            "abcd",
            {"a": ["b", "c"], "b": ["d"], "c": ["d"]},
            {"d": ["a"]},
            [("d", ["b", "c"]), ("b", ["a"]), ("c", ["a"])],
        ),
        ("abc", {"a": ["b"], "b": ["c"]}, {"c": ["b"], "b": ["a"]}, [("b", ["a"])]),
    ],
)
def test_a_route_goes_through_each_problem_once(names: str, u2l: Any, l2u: Any, expected: Any) -> None:
    assert routes(names, u2l, l2u, "a") == expected


def test_dependencies_may_be_given_by_name_and_are_ordered() -> None:
    problems = [written(name, UPPER, lambda p, _: p().sum()) for name in ("top", "low", "middle")]
    dependencies = Dependencies(problems, {"u2l": {"top": ["middle"], "middle": ["low"]}, "l2u": {"low": ["top"]}})
    assert [problem.name for problem in dependencies.lowest_first] == ["low", "middle", "top"]
