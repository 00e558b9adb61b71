"""The loop around the steps: validation, stopping, logging, saving and resuming, and what is refused."""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from quadratics import bilevel, written
from reweighting import all_equal, parameters_of, reweighting, run
from torch import nn

from memfit.errors import InvalidFile, InvalidInput
from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem, IterativeProblem, Problem

ONE = torch.ones(1, dtype=torch.float64)


class Watched(Engine):
    """Validation that gets worse after the second time."""

    def validation(self) -> dict[str, Any]:
        assert not self.problems[0].module.training
        self.times = getattr(self, "times", 0) + 1
        return {"loss": 1.0 / self.times if self.times < 3 else 9.0}


def test_validation_runs_in_eval_mode_and_stops_early() -> None:
    config = EngineConfig(train_iters=100, valid_step=2, early_stopping=True, early_stopping_tolerance=3)
    engine = reweighting(engine=config, engine_class=Watched)
    engine.run()
    assert (engine.global_step, engine.times) == (10, 5)
    assert engine.problems[0].module.training
    assert all(parameter.requires_grad for problem in engine.problems for parameter in problem.parameters())


def test_a_metric_that_validation_does_not_return_is_named() -> None:
    config = EngineConfig(train_iters=2, valid_step=1, early_stopping=True, early_stopping_metric="accuracy")
    with pytest.raises(InvalidInput, match=r"'accuracy'.*'loss'"):
        reweighting(engine=config, engine_class=Watched).run()


def test_losses_and_metrics_are_logged_every_log_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="memfit.multilevel"):
        run(reweighting(upper=Config(log_step=2)), 4)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("reweight,")]
    assert len(lines) == 2
    assert all("loss" in line and "accuracy" in line for line in lines)


def test_no_value_is_waited_for_between_log_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reweighting(lower=Config(unroll_steps=100))
    engine.train_step()

    def refuse(_tensor: torch.Tensor) -> float:
        raise AssertionError("a step waited for a value")

    monkeypatch.setattr(torch.Tensor, "item", refuse)
    monkeypatch.setattr(torch.Tensor, "__float__", refuse)
    engine.train_step()


def test_tensorboard_and_wandb_get_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    written_numbers: list[tuple[str, int]] = []

    class Writer:
        def __init__(self, log_dir: Any) -> None: ...
        def flush(self) -> None: ...
        def add_scalar(self, tag: str, value: float, global_step: int) -> None:
            written_numbers.append((tag, global_step))

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer  # type: ignore[attr-defined]
    wandb = SimpleNamespace(run=1, log=lambda numbers, step: written_numbers.extend((name, step) for name in numbers))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for kind in ("tensorboard", "wandb"):
        run(reweighting(upper=Config(log_step=1), engine=EngineConfig(logger_type=kind)), 1)
    assert written_numbers == [("reweight/loss", 1), ("reweight/accuracy", 1)] * 2


def test_a_logger_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InvalidInput, match="wandb"):
        reweighting(engine=EngineConfig(logger_type="wandb"))


def test_a_progress_bar_counts_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    reweighting(engine=EngineConfig(train_iters=3, progress=True)).run()
    assert "100%" in capsys.readouterr().out


RESUMED = {
    "darts": {"lower": Config(unroll_steps=2), "dropout": 0.5, "norm": True},
    "sama in fp16": {"lower": Config(type="sama", fp16=True), "upper": Config(fp16=True)},
    "unrolled": {"lower": Config(type="unrolled", unroll_steps=2), "dropout": 0.2},
    "unrolled by roots, in the middle of an inner loop": {
        "lower": Config(type="unrolled", unroll_steps=4, unroll_checkpoint="sqrt"),
        "make_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
        "dropout": 0.2,
    },
    "rolled back, in the middle of an inner loop": {
        "lower": Config(unroll_steps=4),
        "engine": EngineConfig(roll_back=True),
    },
    "adamw with a schedule": {
        "make_optimizer": lambda p: torch.optim.AdamW(p, lr=0.01),
        "make_scheduler": lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    },
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Twelve steps over eight batches an epoch, shuffled; saved in the middle of an epoch."""
    whole = run(reweighting(shuffle=True, **RESUMED[name]), 12)
    first = reweighting(shuffle=True, **RESUMED[name])
    run(first, 6)
    first.save(tmp_path / "engine.safetensors")
    torch.manual_seed(99)
    second = reweighting(shuffle=True, **RESUMED[name])
    second.load(tmp_path / "engine.safetensors")
    assert all_equal(whole, run(second, 6))
    assert second.global_step == 12


def test_a_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    config = EngineConfig(train_iters=5)
    engine = reweighting(engine=config)
    run(engine, 3)
    engine.save(tmp_path / "engine")
    again = reweighting(engine=config)
    again.load(tmp_path / "engine")
    again.run()
    assert again.global_step == 5


def test_files_that_are_no_saved_engine_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("nothing")
    for name in ("other", "missing"):
        with pytest.raises(InvalidFile, match=name):
            reweighting().load(tmp_path / name)


def test_another_set_up_is_refused(tmp_path: Path) -> None:
    reweighting().save(tmp_path / "engine")
    lonely = Engine([written("alone", ONE, lambda p, _: p().sum())])
    with pytest.raises(InvalidInput, match=r"classifier.*alone"):
        lonely.load(tmp_path / "engine")


def test_the_spellings_of_the_first_users_are_understood() -> None:
    config = Config(type="darts", log_step=100, gradient_accumulation=4, fp16=True)
    assert config.chosen_precision == "fp16"
    assert EngineConfig(train_iters=10000, valid_step=100, distributed=True).is_distributed
    assert issubclass(IterativeProblem, Problem)


def test_a_program_may_make_everything_in_hooks() -> None:
    """As the first users write it: modules of betty's names, everything configured in methods."""
    from memfit.multilevel.configs import Config
    from memfit.multilevel.engine import Engine
    from memfit.multilevel.problems import ImplicitProblem

    class Child(ImplicitProblem):
        def training_step(self, batch: Any) -> torch.Tensor:
            inputs, targets = batch
            decay = sum(penalty.exp() * weight.square().sum() for penalty, weight in zip(*self.pairs(), strict=True))
            return (self.module(inputs) - targets).square().mean() + decay

        def pairs(self) -> tuple[Any, Any]:
            return self.parent(), list(self.module.parameters())

        def configure_train_data_loader(self) -> Any:
            return [(torch.randn(8, 3), torch.randn(8, 1))]

        def configure_module(self) -> nn.Module:
            return nn.Linear(3, 1)

        def configure_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.module.parameters(), lr=0.1)

        def configure_scheduler(self) -> Any:
            return torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    class Parent(ImplicitProblem):
        def forward(self) -> torch.Tensor:
            return self.module[0]

        def training_step(self, batch: Any) -> dict[str, torch.Tensor]:
            inputs, targets = batch
            return {"loss": (self.child(inputs) - targets).square().mean()}

        def configure_train_data_loader(self) -> Any:
            return [(torch.randn(8, 3), torch.randn(8, 1))]

        def configure_module(self) -> nn.Module:
            return nn.ParameterList([nn.Parameter(torch.zeros(2))])

        def configure_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.module.parameters(), lr=0.1)

    parent = Parent(name="parent", config=Config(type="darts", retain_graph=True))
    child = Child(name="child", config=Config(type="darts", unroll_steps=2))
    engine = Engine(
        config=EngineConfig(train_iters=6),
        problems=[parent, child],
        dependencies={"u2l": {parent: [child]}, "l2u": {child: [parent]}},
        env="shared",
    )
    before = parameters_of(engine)
    engine.run()
    assert (parent.count, child.count, child.env) == (3, 6, "shared")
    assert child.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters_of(engine), strict=True))


def test_problems_are_reached_by_name_from_everywhere() -> None:
    engine = reweighting()
    reweight, classifier = engine.problems
    assert engine.classifier is classifier
    assert reweight.classifier is classifier
    assert classifier.reweight is reweight


# What is refused.


def square(problem: Any, _batch: Any) -> torch.Tensor:
    return problem().square().sum()


def uses(name: str) -> Any:
    return lambda problem, _batch: (problem() * getattr(problem, name)()).sum()


def test_a_circle_is_refused_by_name() -> None:
    a, b = written("a", ONE, square), written("b", ONE, square)
    with pytest.raises(InvalidInput, match=r"'a' and 'b'.*circle"):
        Engine([a, b], None, {"u2l": {a: [b], b: [a]}})


def test_two_problems_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="two problems are named 'a'"):
        Engine([written("a", ONE, square), written("a", ONE, square)])


@pytest.mark.parametrize(("name", "message"), [("my net", "my net"), ("module", "module")])
def test_names_that_cannot_be_attributes_are_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Engine([written(name, ONE, square)])


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "magic"},
        {"unroll_steps": 0},
        {"precision": "fp8"},
        {"fp16": True, "precision": "bf16"},
        {"darts_alpha": 0.0},
        {"reinforce_baseline": 1.0},
        {"unroll_checkpoint": "all"},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(settings))):
        Config(**settings)


def test_a_problem_that_is_not_among_the_problems_is_refused() -> None:
    a, b = written("a", ONE, square), written("b", ONE, square)
    with pytest.raises(InvalidInput, match="'b'"):
        Engine([a], None, {"u2l": {a: [b]}})


@pytest.mark.parametrize("kind", ["darts", "cg", "unrolled"])
def test_a_lower_loss_that_does_not_depend_on_the_upper_is_refused(kind: str) -> None:
    upper, lower = written("upper", ONE, uses("lower")), written("lower", ONE, square, Config(type=kind), rate=0.1)
    engine = Engine([upper, lower], None, bilevel(upper, lower))
    with pytest.raises(InvalidInput, match=r"'lower' does not depend on 'upper'"):
        engine.train_step()


def test_an_upper_loss_that_does_not_depend_on_the_lower_is_refused() -> None:
    upper, lower = written("upper", ONE, square), written("lower", ONE, uses("upper"))
    engine = Engine([upper, lower], None, bilevel(upper, lower))
    with pytest.raises(InvalidInput, match=r"'upper' does not depend on 'lower'"):
        engine.train_step()


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    engine = Engine([written("a", torch.ones(2), lambda p, _: p() * 2)])
    with pytest.raises(InvalidInput, match=r"'a' has the shape \(2,\)"):
        engine.train_step()


def test_a_loss_that_is_no_tensor_is_refused() -> None:
    engine = Engine([written("a", ONE, lambda p, _: {"accuracy": 1})])
    with pytest.raises(InvalidInput, match="'a' returned NoneType"):
        engine.train_step()


def test_a_loss_without_parameters_is_refused() -> None:
    engine = Engine([written("a", ONE, lambda p, _: p().detach().sum())])
    with pytest.raises(InvalidInput, match="'a' depends on no parameter"):
        engine.train_step()


def test_a_missing_module_optimizer_or_loader_is_refused() -> None:
    class Bare(ImplicitProblem):
        def training_step(self, batch: Any) -> torch.Tensor:
            return self().sum()

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, missing in (
        ({"optimizer": optimizer, "train_data_loader": [1]}, "module"),
        ({"module": model, "train_data_loader": [1]}, "optimizer"),
        ({"module": model, "optimizer": optimizer}, "data"),
        ({"module": nn.Linear(1, 1), "optimizer": optimizer, "train_data_loader": [1]}, "holds none"),
    ):
        with pytest.raises(InvalidInput, match=f"'bare'.*{missing}"):
            Engine([Bare("bare", **given)])


def test_an_empty_loader_is_refused() -> None:
    engine = Engine([written("a", ONE, square, batches=())])
    with pytest.raises(InvalidInput, match="'a' gives no batch"):
        engine.train_step()


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("kind", ["cg", "neumann", "nystrom", "unrolled"])
def test_operators_without_a_second_derivative_are_refused_by_second_order_methods(kind: str) -> None:
    def once(problem: Any, _batch: Any) -> torch.Tensor:
        return OnceOnly.apply(problem() - problem.upper()).sum()

    upper, lower = written("upper", ONE, uses("lower")), written("lower", 2 * ONE, once, Config(type=kind), rate=0.1)
    engine = Engine([upper, lower], None, bilevel(upper, lower))
    with pytest.raises(InvalidInput, match=r"'lower' is differentiated twice.*darts"):
        engine.train_step()


def test_hooks_that_cannot_be_differentiated_are_refused_where_steps_are() -> None:
    upper, lower = written("upper", ONE, uses("lower")), written("lower", ONE, uses("upper"), Config(type="unrolled"))
    lower.param_callback = lambda: None
    with pytest.raises(InvalidInput, match="param_callback"):
        Engine([upper, lower], None, bilevel(upper, lower))


@pytest.mark.parametrize("kind", ["sama", "unrolled"])
def test_an_optimizer_that_cannot_be_differentiated_is_refused_where_it_must(kind: str) -> None:
    upper, lower = written("upper", ONE, uses("lower")), written("lower", ONE, uses("upper"), Config(type=kind))
    lower.optimizer = torch.optim.Adafactor(lower.module.parameters())
    engine = Engine([upper, lower], None, bilevel(upper, lower))
    with pytest.raises(InvalidInput, match=r"Adafactor.*'lower'"):
        engine.train_step()


def test_all_parameters_are_open_after_a_run() -> None:
    engine = reweighting(engine=EngineConfig(train_iters=2))
    engine.run()
    assert all(parameter.requires_grad for problem in engine.problems for parameter in problem.parameters())
    assert parameters_of(engine)


def test_flash_attention_is_refused_by_second_order_methods() -> None:
    def attend(problem: Any, _batch: Any) -> torch.Tensor:
        x = (problem() * problem.upper()).view(1, 1, 4, 4)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).square().sum()

    values = torch.linspace(0, 1, 16)
    upper, lower = written("upper", torch.ones(1), uses("lower")), written("lower", values, attend, Config(type="cg"))
    engine = Engine([upper, lower], None, bilevel(upper, lower))
    with pytest.raises(InvalidInput, match=r"'lower' is differentiated twice.*flash"):
        engine.train_step()
