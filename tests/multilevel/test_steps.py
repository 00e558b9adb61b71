"""Steps of whole programs: against hand-written loops, and invariants that hold bit for bit or nearly."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reweighting import all_equal, data, largest_difference, reweighting, run
from torch.utils.data import DataLoader

from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem
from memfit.multilevel.hypergradient import METHODS as METHODS_OF_MEMFIT
from memfit.multilevel.hypergradient.method import Method

METHODS = {
    "darts": Config(type="darts"),
    "sama": Config(type="sama"),
    "neumann": Config(type="neumann", neumann_iterations=3, neumann_alpha=0.1),
    "cg": Config(type="cg", cg_iterations=3, cg_damping=1.0),
    "nystrom": Config(type="nystrom", nystrom_rank=4, nystrom_damping=1.0),
    "unrolled": Config(type="unrolled", unroll_steps=2),
}


def with_settings(config: Config, **settings: Any) -> Config:
    return dataclasses.replace(config, **settings)


class Single(ImplicitProblem):
    def training_step(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


def single(optimizer: Any, network: Any, scheduler: Any = None, config: Config | None = None) -> Engine:
    loader = DataLoader(data(64, 1), batch_size=8)
    problem = Single("single", config, network, optimizer, scheduler, loader)
    return Engine([problem], EngineConfig(train_iters=6, valid_step=10**9))


def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False))


OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "Muon")
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_its_groups_steps_as_in_a_plain_loop(name: str) -> None:
    def groups(model: torch.nn.Module) -> Any:
        if name == "LBFGS":
            return model.parameters()
        return [{"params": [model[0].weight], "lr": 0.01}, {"params": [model[0].bias, model[2].weight], "lr": 0.05}]

    planned, plain = network(), network()
    single(OPTIMIZERS[name](groups(planned), lr=0.02), planned).run()

    optimizer = OPTIMIZERS[name](groups(plain), lr=0.02)
    loader = list(DataLoader(data(64, 1), batch_size=8))
    for inputs, labels in loader[:6]:

        def closure(inputs: Any = inputs, labels: Any = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(inputs), labels)
            loss.backward()
            return loss.detach()

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert all_equal(list(planned.parameters()), list(plain.parameters()))


def test_muon_and_sparse_adam_step_as_in_a_plain_loop() -> None:
    torch.manual_seed(5)
    embeddings = [torch.nn.Embedding(10, 4, sparse=True) for _ in range(2)]
    embeddings[1].load_state_dict(embeddings[0].state_dict())
    batches = [torch.tensor([1, 2, 2]), torch.tensor([3, 1, 4])]

    class Looked(ImplicitProblem):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self(batch).square().sum()

    problem = Looked("looked", None, embeddings[0], torch.optim.SparseAdam(embeddings[0].parameters()), None, batches)
    run(Engine([problem], EngineConfig()), 2)
    optimizer = torch.optim.SparseAdam(embeddings[1].parameters())
    for batch in batches:
        optimizer.zero_grad()
        embeddings[1](batch).square().sum().backward()
        optimizer.step()
    assert torch.equal(embeddings[0].weight, embeddings[1].weight)


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=8),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_kind_of_scheduler_keeps_the_rates_of_a_plain_loop(name: str) -> None:
    def made(model: torch.nn.Module) -> tuple[Any, Any]:
        groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters(), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    planned, plain = network(), network()
    optimizer, scheduler = made(planned)
    single(optimizer, planned, scheduler).run()
    other, schedule = made(plain)
    for inputs, labels in list(DataLoader(data(64, 1), batch_size=8))[:6]:
        other.zero_grad()
        loss = F.cross_entropy(plain(inputs), labels)
        loss.backward()
        other.step()
        schedule.step(*[loss.item()] if name == "ReduceLROnPlateau" else [])
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]
    assert all_equal(list(planned.parameters()), list(plain.parameters()))


def test_a_finite_difference_step_is_that_of_a_hand_written_loop() -> None:
    engine = reweighting()
    by_hand = reweighting()
    found = run(engine, 3)
    net, weigher = by_hand.problems[1].module, by_hand.problems[0].module
    inner, outer = by_hand.problems[1].optimizer, by_hand.problems[0].optimizer

    def weighted(batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return (weigher(losses.detach().unsqueeze(1)).squeeze(1) * losses).mean()

    train, meta = DataLoader(data(64, 1), batch_size=8), DataLoader(data(32, 2), batch_size=8)
    for (batch, other), _ in zip(zip(train, meta, strict=False), range(3), strict=False):
        inner.zero_grad()
        weighted(batch).backward()
        inner.step()
        vector = torch.autograd.grad(F.cross_entropy(net(other[0]), other[1]), list(net.parameters()))
        step = 0.01 / torch.cat([part.flatten() for part in vector]).norm()
        kept = [parameter.detach().clone() for parameter in net.parameters()]
        sides = []
        for sign in (1, -1):
            for parameter, own, part in zip(net.parameters(), kept, vector, strict=True):
                parameter.data = own + sign * step * part
            sides.append(torch.autograd.grad(weighted(batch), list(weigher.parameters())))
        for parameter, own in zip(net.parameters(), kept, strict=True):
            parameter.data = own
        for parameter, plus, minus in zip(weigher.parameters(), *sides, strict=True):
            parameter.grad = (minus - plus) / (2 * step)
        outer.step()
    by_hand_parameters = [p.detach() for problem in by_hand.problems for p in problem.parameters()]
    assert largest_difference(found, by_hand_parameters) <= 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_accumulated_micro_batches_equal_the_full_batch(method: str) -> None:
    config, accumulated = METHODS[method], {"gradient_accumulation": 4}
    full = reweighting(lower=config, dtype=torch.float64, batch_size=16)
    parts = reweighting(
        lower=with_settings(config, **accumulated), upper=Config(**accumulated), dtype=torch.float64, batch_size=4
    )
    assert largest_difference(run(full, 3), run(parts, 3)) <= 1e-6


def test_a_smaller_last_micro_batch_has_its_share() -> None:
    """64 samples by 24: 24, 24, 16 in three micro-batches are one batch of 64."""
    full = reweighting(dtype=torch.float64, batch_size=64)
    parts = reweighting(lower=Config(gradient_accumulation=3), dtype=torch.float64, batch_size=24)
    parts.problems[0].cursors[0].loader = full.problems[0].cursors[0].loader
    assert largest_difference(run(full, 2), run(parts, 2)) <= 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_going_through_a_step_again_leaves_no_trace(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout and BatchNorm below: hypergradients draw nothing and update no statistics."""

    def without_looking(pull: Any) -> Any:
        return {problem: [torch.zeros_like(p) for p in problem.parameter_list] for problem in pull.onto}

    states = []
    for looks in (True, False):
        engine = reweighting(lower=METHODS[method], dropout=0.5, norm=True)
        engine.problems[0].optimizer.param_groups[0]["lr"] = 0.0
        if not looks:
            stand_in = Method(pull=without_looking, second_order=METHODS_OF_MEMFIT[method].second_order)
            monkeypatch.setitem(METHODS_OF_MEMFIT, method, stand_in)
        run(engine)
        states.append([*engine.problems[1].module.state_dict().values(), torch.get_rng_state()])
    assert all_equal(*states)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("method", ["darts", "cg", "unrolled"])
def test_half_precision_trains_near_full_precision(precision: Any, method: str) -> None:
    full = run(reweighting(lower=METHODS[method]), 4)
    half = reweighting(lower=with_settings(METHODS[method], precision=precision), upper=Config(precision=precision))
    assert 0 < largest_difference(full, run(half, 4)) <= 0.03


def test_an_overflow_leaves_the_parameters_and_halves_the_scale() -> None:
    engine = reweighting(lower=Config(fp16=True, initial_dynamic_scale=1e30))
    classifier = engine.problems[1]
    before = [parameter.detach().clone() for parameter in classifier.parameters()]
    engine.train_step()
    assert all_equal(before, list(classifier.parameters()))
    assert classifier.mixed.scale == 5e29


def test_clipping_bounds_the_gradient() -> None:
    engine = reweighting(lower=Config(gradient_clipping=1e-3))
    lengths: list[float] = []
    engine.problems[1].grad_callback = lambda ps: lengths.append(
        float(torch.cat([p.grad.flatten() for p in ps]).norm())
    )
    run(engine, 3)
    assert max(lengths) <= 1.001e-3


def test_param_callbacks_and_inner_loop_hooks_are_called() -> None:
    engine = reweighting(lower=Config(unroll_steps=2))
    calls: list[str] = []
    classifier = engine.problems[1]
    classifier.on_inner_loop_start = lambda: calls.append("start")
    classifier.param_callback = lambda: calls.append("changed")
    run(engine, 4)
    assert calls == ["start", "changed", "changed", "start", "changed", "changed"]


def test_uppers_wait_for_unrolling_and_warm_up() -> None:
    engine = reweighting(lower=Config(unroll_steps=2, warmup_steps=4))
    counts = []
    for _ in range(8):
        engine.train_step()
        counts.append(engine.problems[0].count)
    assert counts == [0, 0, 0, 0, 0, 1, 1, 2]


def test_roll_back_makes_the_lower_step_again_under_the_new_upper() -> None:
    rolled = reweighting(engine=EngineConfig(train_iters=1, roll_back=True))
    plain = reweighting(engine=EngineConfig(train_iters=1))
    start = [parameter.detach().clone() for parameter in plain.problems[1].parameters()]
    run(plain, 1)
    plain.openness.all()
    weigher = plain.problems[0].module  # after its step, the same in both
    run(rolled, 1)
    assert all_equal(list(weigher.parameters()), list(rolled.problems[0].parameters()))
    net = plain.problems[1].module
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), start, strict=True):
            parameter.copy_(value)
    inputs, labels = next(iter(DataLoader(data(64, 1), batch_size=8)))
    losses = F.cross_entropy(net(inputs), labels, reduction="none")
    loss = (weigher(losses.detach().unsqueeze(1)).squeeze(1) * losses).mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    expected = [w - 0.1 * g for w, g in zip(start, gradients, strict=True)]
    assert largest_difference(list(rolled.problems[1].parameters()), expected) <= 1e-7


def test_several_loaders_give_a_tuple_of_batches() -> None:
    seen: list[Any] = []

    class Pair(ImplicitProblem):
        def training_step(self, batch: Any) -> torch.Tensor:
            seen.append(batch)
            return self(batch[0]).sum() + batch[1].sum()

    model = torch.nn.Linear(2, 1)
    loaders = ([torch.ones(3, 2)], [torch.zeros(1), torch.ones(1)])
    problem = Pair("pair", None, model, torch.optim.SGD(model.parameters(), lr=0.1), None, loaders)
    run(Engine([problem], EngineConfig()), 3)
    assert [float(batch[1]) for batch in seen] == [0.0, 1.0, 0.0]
