"""Every method against closed forms, in fp64."""

from typing import Any

import pytest
import torch
from quadratics import DIMENSION, Written, bilevel, hypergradient, normal, positive, written

from memfit.multilevel import Config, IterativeProblem

A = positive()
B, C, TARGET = normal(DIMENSION, seed=1), normal(DIMENSION, 3, seed=2), normal(DIMENSION, seed=3)
UPPER = normal(3, seed=4)


def quadratic(problem: Any, _batch: Any) -> torch.Tensor:
    w = problem()
    return 0.5 * w @ A @ w - (B + C @ problem.upper()) @ w


def distance(problem: Any, _batch: Any) -> torch.Tensor:
    return 0.5 * (problem.lower() - TARGET).square().sum()


def solution(upper: torch.Tensor = UPPER) -> torch.Tensor:
    return torch.linalg.solve(A, B + C @ upper)


def exact() -> torch.Tensor:
    return C.T @ torch.linalg.solve(A, solution() - TARGET)


def found(config: Config, start: torch.Tensor | None = None, rate: float = 0.0, **kwargs: Any) -> torch.Tensor:
    lower = written("lower", solution() if start is None else start, quadratic, config, rate=rate, **kwargs)
    upper = written("upper", UPPER, distance)
    return hypergradient([upper, lower], bilevel(upper, lower), upper)


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm())


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_cg_is_exact_whatever_its_scale(alpha: float) -> None:
    assert error(found(Config(type="cg", cg_iterations=DIMENSION, cg_alpha=alpha)), exact()) <= 1e-8


def test_cg_with_damping_solves_the_damped_system() -> None:
    damped = C.T @ torch.linalg.solve(A + 0.7 * torch.eye(DIMENSION), solution() - TARGET)
    assert error(found(Config(type="cg", cg_iterations=DIMENSION, cg_damping=0.7)), damped) <= 1e-8


def test_cg_stops_at_its_tolerance() -> None:
    rough = error(found(Config(type="cg", cg_iterations=100, cg_tolerance=0.1)), exact())
    assert 1e-6 < rough < 0.3


@pytest.mark.parametrize("iterations", [0, 3, 30])
def test_neumann_is_its_series(iterations: int) -> None:
    vector, term = torch.zeros(DIMENSION, dtype=torch.float64), solution() - TARGET
    for _ in range(iterations + 1):
        vector, term = vector + 0.6 * term, term - 0.6 * A @ term
    result = found(Config(type="neumann", neumann_iterations=iterations, neumann_alpha=0.6))
    assert error(result, C.T @ vector) <= 1e-12
    assert error(result, exact()) <= 4 * (1 - 0.6 * 0.5) ** (iterations + 1)


def test_nystrom_at_full_rank_is_exact() -> None:
    assert error(found(Config(type="nystrom", nystrom_rank=DIMENSION, nystrom_damping=0.0)), exact()) <= 1e-6


def test_nystrom_below_full_rank_is_near_where_the_damping_fits_the_rest() -> None:
    partial = error(found(Config(type="nystrom", nystrom_rank=2, nystrom_damping=0.9)), exact())
    assert 1e-6 < partial < 0.8


def test_the_finite_difference_is_exact_where_the_curvature_is_the_identity() -> None:
    def loss(problem: Any, _batch: Any) -> torch.Tensor:
        return 0.5 * problem().square().sum() - (B + C @ problem.upper()) @ problem()

    lower = written("lower", B + C @ UPPER, loss, Config(type="darts"))
    upper = written("upper", UPPER, distance)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)
    assert error(result, C.T @ (B + C @ UPPER - TARGET)) <= 1e-4
    assert torch.equal(lower.module.values, B + C @ UPPER), "the perturbation is taken back exactly"


def test_sama_is_one_step_of_the_optimizer() -> None:
    start = normal(DIMENSION, seed=9)
    result = found(Config(type="sama"), start=start, rate=0.3)
    after = start - 0.3 * (A @ start - B - C @ UPPER)
    assert error(result, 0.3 * C.T @ (after - TARGET)) <= 1e-6


def test_sama_pulls_through_adam() -> None:
    start = normal(DIMENSION, seed=9)
    lower = written("lower", start, quadratic, Config(type="sama"))
    lower.optimizer = torch.optim.Adam(lower.module.parameters(), lr=0.1)
    upper = written("upper", UPPER, distance)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)

    twin = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([twin], lr=0.1)
    twin.grad = A @ start - B - C @ UPPER
    optimizer.step()
    w, state = twin.detach(), optimizer.state[twin]
    g = (A @ w - B - C @ UPPER).requires_grad_()
    m, v = 0.9 * state["exp_avg"] + 0.1 * g, 0.999 * state["exp_avg_sq"] + 0.001 * g**2
    moved = w - 0.1 * (m / (1 - 0.9**2)) / ((v / (1 - 0.999**2)).sqrt() + 1e-8)
    (by_gradient,) = torch.autograd.grad(moved, g, w - TARGET)
    assert error(result, -C.T @ by_gradient) <= 1e-6


def unrolled_reference(start: torch.Tensor, rate: float, steps: int, last: int | None = None) -> torch.Tensor:
    """η Σ_{k<T} Cᵀ(I - ηA)^k (w_T - t)."""
    w = start
    for _ in range(steps):
        w = w - rate * (A @ w - B - C @ UPPER)
    total, vector = torch.zeros(3, dtype=torch.float64), w - TARGET
    for _ in range(steps if last is None else last):
        total, vector = total + rate * C.T @ vector, vector - rate * A @ vector
    return total


@pytest.mark.parametrize("checkpoint", ["step", "sqrt"])
def test_unrolled_descent_is_exact(checkpoint: Any) -> None:
    start = normal(DIMENSION, seed=9)
    config = Config(type="unrolled", unroll_steps=7, unroll_checkpoint=checkpoint)
    assert error(found(config, start, 0.2), unrolled_reference(start, 0.2, 7)) <= 1e-8


def test_first_order_false_and_iterative_problems_are_unrolled() -> None:
    class Unrolled(Written, IterativeProblem):
        @property
        def method(self) -> str:
            return IterativeProblem.method.fget(self)  # type: ignore[attr-defined,no-any-return]

    start = normal(DIMENSION, seed=9)
    reference = unrolled_reference(start, 0.2, 4)
    assert error(found(Config(first_order=False, unroll_steps=4), start, 0.2), reference) <= 1e-8
    assert error(found(Config(unroll_steps=4), start, 0.2, kind=Unrolled), reference) <= 1e-8


def test_truncation_keeps_the_last_steps() -> None:
    start = normal(DIMENSION, seed=9)
    config = Config(type="unrolled", unroll_steps=6, unroll_truncation=2)
    assert error(found(config, start, 0.2), unrolled_reference(start, 0.2, 6, last=2)) <= 1e-8


OPTIMIZERS = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd damped": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("checkpoint", ["step", "sqrt"])
def test_unrolled_optimizers_agree_with_a_difference_of_whole_runs(name: str, checkpoint: Any) -> None:
    start, make = normal(DIMENSION, seed=9), OPTIMIZERS[name]

    def final_loss(upper: torch.Tensor) -> float:
        w = torch.nn.Parameter(start.clone())
        optimizer = make([w])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for _ in range(5):
            w.grad = (A @ w - B - C @ upper).detach()
            optimizer.step()
            schedule.step()
        return float(0.5 * (w.detach() - TARGET).square().sum())

    lower = written("lower", start, quadratic, Config(type="unrolled", unroll_steps=5, unroll_checkpoint=checkpoint))
    lower.optimizer = make(lower.module.parameters())
    lower.scheduler = torch.optim.lr_scheduler.StepLR(lower.optimizer, 2, gamma=0.5)
    upper = written("upper", UPPER, distance)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)
    small = 1e-5
    for number in range(3):
        unit = torch.zeros(3, dtype=torch.float64)
        unit[number] = small
        difference = (final_loss(UPPER + unit) - final_loss(UPPER - unit)) / (2 * small)
        assert float(result[number]) == pytest.approx(difference, rel=1e-5, abs=1e-8)


def test_a_learning_rate_is_differentiated_through_update() -> None:
    class Descending(Written):
        def update(self, parameters: Any, gradients: Any) -> Any:
            return [w - self.upper() * g for w, g in zip(parameters, gradients, strict=True)]

    start, rate = normal(DIMENSION, seed=9), torch.tensor([0.2], dtype=torch.float64)
    lower = written(
        "lower", start, lambda p, _: 0.5 * p() @ A @ p() - B @ p(), Config(type="unrolled"), kind=Descending
    )
    lower.optimizer = None
    upper = written("upper", rate, distance)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)
    slope = A @ start - B
    assert error(result, -((start - rate * slope - TARGET) @ slope).reshape(1)) <= 1e-8


@pytest.mark.parametrize("first_order", [None, True])
def test_maml_differentiates_to_where_the_inner_loop_starts(first_order: bool | None) -> None:
    class Adapting(Written):
        def initial_parameters(self) -> Any:
            return [self.upper()]

    phi = normal(DIMENSION, seed=5)
    config = Config(type="unrolled", unroll_steps=3, first_order=first_order)
    lower = written("lower", phi * 0, lambda p, _: 0.5 * p() @ A @ p() - B @ p(), config, rate=0.2, kind=Adapting)
    upper = written("upper", phi, distance)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)
    shrinking = torch.eye(DIMENSION, dtype=torch.float64) - 0.2 * A
    w = phi
    for _ in range(3):
        w = w - 0.2 * (A @ w - B)
    reference = w - TARGET if first_order else torch.linalg.matrix_power(shrinking, 3) @ (w - TARGET)
    assert error(result, reference) <= 1e-8


def test_gradient_clipping_is_differentiated() -> None:
    start, longest = normal(DIMENSION, seed=9), 0.5
    config = Config(type="unrolled", unroll_steps=2, gradient_clipping=longest)
    upper = UPPER.clone().requires_grad_()
    w = start
    for _ in range(2):
        g = A @ w - B - C @ upper
        w = w - 0.3 * g * (longest / (g.norm() + 1e-6)).clamp(max=1)
    (reference,) = torch.autograd.grad(0.5 * (w - TARGET).square().sum(), upper)
    assert error(found(config, start, 0.3), reference) <= 1e-8


def test_ridge_with_one_penalty_for_each_weight() -> None:
    x, y = normal(20, DIMENSION, seed=6), normal(20, seed=7)
    penalty = normal(DIMENSION, seed=8).abs() + 0.5
    hessian = x.T @ x / 20 + torch.diag(penalty)
    w = torch.linalg.solve(hessian, x.T @ y / 20)

    def ridge(problem: Any, _batch: Any) -> torch.Tensor:
        return 0.5 * (x @ problem() - y).square().mean() + 0.5 * (problem.upper() * problem().square()).sum()

    lower = written("lower", w, ridge, Config(type="cg", cg_iterations=20))
    upper = written("upper", penalty, distance)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)
    assert error(result, -w * torch.linalg.solve(hessian, w - TARGET)) <= 1e-8


def test_weighted_least_squares() -> None:
    x, y, weights = normal(12, DIMENSION, seed=6), normal(12, seed=7), normal(12, seed=8).abs()
    hessian = x.T @ torch.diag(weights) @ x + 0.3 * torch.eye(DIMENSION)
    w = torch.linalg.solve(hessian, x.T @ (weights * y))

    def weighted(problem: Any, _batch: Any) -> torch.Tensor:
        return 0.5 * (problem.upper() * (x @ problem() - y).square()).sum() + 0.15 * problem().square().sum()

    lower = written("lower", w, weighted, Config(type="cg", cg_iterations=20))
    upper = written("upper", weights, distance)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)
    assert error(result, -(x @ w - y) * (x @ torch.linalg.solve(hessian, w - TARGET))) <= 1e-8


def test_implicit_maml_with_its_own_direct_term() -> None:
    x, y, phi = normal(12, DIMENSION, seed=6), normal(12, seed=7), normal(DIMENSION, seed=8)
    hessian = x.T @ x + 0.8 * torch.eye(DIMENSION)
    w = torch.linalg.solve(hessian, x.T @ y + 0.8 * phi)

    def near(problem: Any, _batch: Any) -> torch.Tensor:
        return 0.5 * (x @ problem() - y).square().sum() + 0.4 * (problem() - problem.upper()).square().sum()

    def meta(problem: Any, _batch: Any) -> torch.Tensor:
        return 0.5 * (problem.lower() - TARGET).square().sum() + 0.1 * problem().square().sum()

    lower = written("lower", w, near, Config(type="cg", cg_iterations=20))
    upper = written("upper", phi, meta)
    result = hypergradient([upper, lower], bilevel(upper, lower), upper)
    assert error(result, 0.8 * torch.linalg.solve(hessian, w - TARGET) + 0.2 * phi) <= 1e-8


EXACT_METHODS = [
    Config(type="cg", cg_iterations=2 * DIMENSION),
    Config(type="nystrom", nystrom_rank=DIMENSION, nystrom_damping=0.0),
    Config(type="neumann", neumann_iterations=200, neumann_alpha=0.9),
]


@pytest.mark.parametrize("config", EXACT_METHODS, ids=lambda config: config.type)
def test_three_levels_in_a_chain(config: Config) -> None:
    a2, a3, c2, c3 = positive(seed=11), positive(seed=12), normal(5, 3, seed=13), normal(5, 5, seed=14)

    def second(u: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a2, c2 @ u)

    def third(w2: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a3, c3 @ w2 + B)

    u = UPPER.clone().requires_grad_()
    outer = 0.5 * (third(second(u)) - TARGET).square().sum() + 0.3 * second(u).square().sum()
    (reference,) = torch.autograd.grad(outer, u)

    top = written("top", UPPER, lambda p, _: 0.5 * (p.low() - TARGET).square().sum() + 0.3 * p.middle().square().sum())
    middle = written("middle", second(UPPER), lambda p, _: 0.5 * p() @ a2 @ p() - (c2 @ p.top()) @ p(), config)
    low = written("low", third(second(UPPER)), lambda p, _: 0.5 * p() @ a3 @ p() - (c3 @ p.middle() + B) @ p(), config)
    dependencies = {"u2l": {top: [middle], middle: [low]}, "l2u": {low: [top], middle: [top]}}
    assert error(hypergradient([top, middle, low], dependencies, top), reference) <= 1e-6


@pytest.mark.parametrize("config", EXACT_METHODS, ids=lambda config: config.type)
def test_a_diamond(config: Config) -> None:
    al, ar, a4 = positive(seed=11), positive(seed=12), positive(seed=15)
    cl, cr, dl, dr = normal(5, 3, seed=13), normal(5, 3, seed=14), normal(5, 5, seed=16), normal(5, 5, seed=17)

    def left(u: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(al, cl @ u)

    def right(u: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(ar, cr @ u)

    def bottom(u: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a4, dl @ left(u) + dr @ right(u))

    u = UPPER.clone().requires_grad_()
    (reference,) = torch.autograd.grad(0.5 * (bottom(u) - TARGET).square().sum(), u)

    p1 = written("p1", UPPER, lambda p, _: 0.5 * (p.p4() - TARGET).square().sum())
    p2 = written("p2", left(UPPER), lambda p, _: 0.5 * p() @ al @ p() - (cl @ p.p1()) @ p(), config)
    p3 = written("p3", right(UPPER), lambda p, _: 0.5 * p() @ ar @ p() - (cr @ p.p1()) @ p(), config)
    p4 = written("p4", bottom(UPPER), lambda p, _: 0.5 * p() @ a4 @ p() - (dl @ p.p2() + dr @ p.p3()) @ p(), config)
    dependencies = {"u2l": {p1: [p2, p3], p2: [p4], p3: [p4]}, "l2u": {p4: [p1]}}
    assert error(hypergradient([p1, p2, p3, p4], dependencies, p1), reference) <= 1e-6


def test_a_lower_solution_that_reaches_the_top_through_the_middle() -> None:
    """Top changes low, low changes middle, middle changes the loss of top: down, up, up."""
    config = Config(type="cg", cg_iterations=2 * DIMENSION)
    a2, a3, c3, d = positive(seed=11), positive(seed=12), normal(5, 3, seed=13), normal(5, 5, seed=14)

    def third(u: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a3, c3 @ u)

    def second(u: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a2, d @ third(u))

    u = UPPER.clone().requires_grad_()
    (reference,) = torch.autograd.grad(0.5 * (second(u) - TARGET).square().sum(), u)
    top = written("top", UPPER, lambda p, _: 0.5 * (p.middle() - TARGET).square().sum())
    middle = written("middle", second(UPPER), lambda p, _: 0.5 * p() @ a2 @ p() - (d @ p.low()) @ p(), config)
    low = written("low", third(UPPER), lambda p, _: 0.5 * p() @ a3 @ p() - (c3 @ p.top()) @ p(), config)
    dependencies = {"u2l": {top: [low]}, "l2u": {low: [middle], middle: [top]}}
    assert error(hypergradient([top, middle, low], dependencies, top), reference) <= 1e-8


def test_reinforce_is_unbiased() -> None:
    """Over all choices, weighted by their probability, the gradient is that of the expected loss."""
    logit = torch.tensor([0.3], dtype=torch.float64)

    def gradient_if(chosen: bool) -> torch.Tensor:
        def choose(problem: Any, _batch: Any) -> Any:
            log_prob = torch.nn.functional.logsigmoid(problem.upper() if chosen else -problem.upper())
            problem.module.values.data.fill_(2.0 if chosen else 0.5)
            return {"loss": torch.zeros(()), "log_prob": log_prob}

        lower = written("lower", torch.zeros(1, dtype=torch.float64), choose, Config(type="reinforce"))
        upper = written("upper", logit, lambda p, _: p.lower().square().sum() + 0 * p().sum())
        return hypergradient([upper, lower], bilevel(upper, lower), upper)

    p = torch.sigmoid(logit)
    expected = p * gradient_if(True) + (1 - p) * gradient_if(False)
    assert error(expected, p * (1 - p) * (2.0**2 - 0.5**2)) <= 1e-12


@pytest.mark.parametrize("config", EXACT_METHODS[:2], ids=lambda config: config.type)
@pytest.mark.parametrize("top_reaches_low", [False, True])
def test_a_middle_problem_whose_lower_answers(config: Config, top_reaches_low: bool) -> None:
    """The middle one minimises over itself and the low one's answer: a nested solve."""
    a2, a3, c2, c3 = positive(seed=11), positive(seed=12), normal(5, 3, seed=13), 0.3 * normal(5, 5, seed=14)
    d3 = normal(5, 3, seed=18) if top_reaches_low else torch.zeros(5, 3, dtype=torch.float64)
    goal = normal(5, seed=19)

    def low_of(w2: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a3, c3 @ w2 + d3 @ u + B)

    answer = torch.linalg.solve(a3, c3)

    def middle_of(u: torch.Tensor) -> torch.Tensor:
        """Where a2 w2 - c2 u + 0.5 w3 + Jᵀ(0.5 w2 + w3 - goal) = 0."""
        base = torch.linalg.solve(a3, d3 @ u + B)
        matrix = a2 + 0.5 * answer + 0.5 * answer.T + answer.T @ answer
        return torch.linalg.solve(matrix, c2 @ u - 0.5 * base - answer.T @ (base - goal))

    u = UPPER.clone().requires_grad_()
    outer = 0.5 * (middle_of(u) - TARGET).square().sum()
    (reference,) = torch.autograd.grad(outer, u)

    def middle_loss(p: Any, _batch: Any) -> torch.Tensor:
        own = 0.5 * p() @ a2 @ p() - (c2 @ p.top()) @ p()
        return own + 0.5 * p() @ p.low() + 0.5 * (p.low() - goal).square().sum()

    def low_loss(p: Any, _batch: Any) -> torch.Tensor:
        return 0.5 * p() @ a3 @ p() - (c3 @ p.middle() + d3 @ p.top() + B) @ p()

    w2 = middle_of(UPPER)
    top = written("top", UPPER, lambda p, _: 0.5 * (p.middle() - TARGET).square().sum())
    middle = written("middle", w2, middle_loss, config)
    low = written("low", low_of(w2, UPPER), low_loss, config)
    lowers_of_top = [middle, low] if top_reaches_low else [middle]
    dependencies = {"u2l": {top: lowers_of_top, middle: [low]}, "l2u": {low: [middle], middle: [top]}}
    slopes: list[torch.Tensor] = []
    middle.grad_callback = lambda parameters: slopes.append(parameters[0].grad.clone())
    assert error(hypergradient([top, middle, low], dependencies, top), reference) <= 1e-6
    assert float(slopes[0].norm()) <= 1e-6, "the middle problem is at its solution"
