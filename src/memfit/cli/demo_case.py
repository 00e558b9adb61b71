"""One model of the demo: estimated, planned, and trained beside its eager twin."""

import copy
import dataclasses
import importlib.util
import logging
import statistics
import time
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from memfit import api
from memfit.capture.sample import Sample
from memfit.cli.models import find_model, parse_model
from memfit.cli.progress import Display
from memfit.estimate import Estimate
from memfit.measure.peak import measure_peak
from memfit.plan.plan import Plan
from memfit.tensors import same_bits

_FRACTION = 0.5  # of what the unplanned step has beyond parameters, gradients, buffers and batch
_TOLERANCE = 0.01  # what a measured peak may be above the budget
_LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoCase:
    """A model by name and the shape of its batch."""

    name: str
    package: str
    reference: str
    batch_size: int
    pixels: int = 0  # of an image
    tokens: int = 0  # of a text
    classes: int  # or words
    outputs: str = "all"

    @property
    def missing(self) -> str:
        """Say why it cannot run here; empty if it can."""
        is_installed = importlib.util.find_spec(self.package) is not None
        return "" if is_installed else f"{self.package} is not installed (pip install 'memfit[models]')"

    def batch(self) -> Mapping[str, torch.Tensor]:
        """Random images with labels, or random words that are their own labels."""
        if self.pixels:
            images = torch.randn(self.batch_size, 3, self.pixels, self.pixels)
            return {"x": images, "labels": torch.randint(self.classes, (self.batch_size,))}
        words = torch.randint(self.classes, (self.batch_size, self.tokens))
        return {"input_ids": words, "labels": words.clone()}

    def sample(self, batch: Mapping[str, torch.Tensor]) -> Sample:
        """What the model itself takes."""
        return Sample((batch["x"],)) if self.pixels else Sample((), dict(batch))

    def loss(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one training step, as people write it."""
        if self.pixels:
            return F.cross_entropy(model(batch["x"]), batch["labels"])
        loss: torch.Tensor = model(**batch).loss
        return loss


CASES = (
    DemoCase(
        name="ResNet-50",
        package="torchvision",
        reference="torchvision.models.resnet50()",
        batch_size=8,
        pixels=128,
        classes=1000,
    ),
    DemoCase(
        name="GPT-2",
        package="transformers",
        reference="transformers:GPT2LMHeadModel()",
        batch_size=4,
        tokens=128,
        classes=50257,
        outputs="loss",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What was promised for a model and what was measured."""

    case: DemoCase
    estimate: Estimate
    plan: Plan
    budget_bytes: int
    eager_peak_bytes: int
    planned_peak_bytes: int
    slowdown: float  # median over pairs of steps
    last_loss: float
    equal: bool  # losses and gradients of every step, bit for bit

    @property
    def fits(self) -> bool:
        return self.planned_peak_bytes <= self.budget_bytes * (1 + _TOLERANCE)

    @property
    def kept_promises(self) -> bool:
        return self.fits and self.equal


def run_case(case: DemoCase, *, steps: int, time_limit_s: float, seed: int, shown: Display) -> Result:
    """Estimate, plan, train side by side."""
    shown.doing(f"{case.name}: building")
    factory = find_model(parse_model(case.reference))
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of a loss that nobody chose
    torch.manual_seed(seed)
    model, batch = factory.build(), case.batch()
    sample = case.sample(batch)
    shown.doing(f"{case.name}: estimating")
    estimate = api.estimate(model, dict(batch), loss=case.loss)
    budget_bytes = half_of_the_activations(model, estimate)
    shown.doing(f"{case.name}: planning")
    plan = api.plan(model, sample, budget=budget_bytes, outputs=case.outputs, time_limit=time_limit_s)
    shown.doing(f"{case.name}: applying the plan")
    twins = {"eager": copy.deepcopy(model), "planned": api.apply(plan, model, sample)}
    training = _Training(case, twins, batch, seed)
    for step in range(steps):
        training.step(step)
        shown.ran(step + 1, steps)
    shown.doing(f"{case.name}: measuring peaks")
    peaks = {name: _peak_bytes(case, twin, batch, seed) for name, twin in twins.items()}
    return Result(
        case=case,
        estimate=estimate,
        plan=plan,
        budget_bytes=budget_bytes,
        eager_peak_bytes=peaks["eager"],
        planned_peak_bytes=peaks["planned"],
        slowdown=statistics.median(training.ratios) - 1,
        last_loss=training.last_loss,
        equal=training.equal,
    )


def half_of_the_activations(model: nn.Module, estimate: Estimate) -> int:
    """A budget: what lives when the step ends, and half of what the unplanned step has beyond that."""
    gradients = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
    lasting_bytes = estimate.timeline.resident_bytes + gradients
    return lasting_bytes + int(_FRACTION * (estimate.peak_bytes - lasting_bytes))


class _Training:
    """Twins that take the same steps in turns."""

    def __init__(
        self, case: DemoCase, twins: Mapping[str, nn.Module], batch: Mapping[str, torch.Tensor], seed: int
    ) -> None:
        self._case, self._twins, self._batch, self._seed = case, twins, batch, seed
        self._optimizers = {name: torch.optim.SGD(twin.parameters(), lr=_LEARNING_RATE) for name, twin in twins.items()}
        self.ratios: list[float] = []
        self.last_loss = float("nan")
        self.equal = True

    def step(self, number: int) -> None:
        """One step of each, the first to go changing from step to step."""
        names = sorted(self._twins, reverse=bool(number % 2))
        seconds, losses = {}, {}
        for name in names:
            start = time.perf_counter()
            losses[name] = _step(self._case, self._twins[name], self._batch, self._seed + number)
            seconds[name] = time.perf_counter() - start
        eager, planned = self._twins["eager"], self._twins["planned"]
        self.equal &= same_bits(losses["eager"], losses["planned"]) and _equal_gradients(eager, planned)
        for optimizer in self._optimizers.values():
            optimizer.step()
        self.ratios.append(seconds["planned"] / seconds["eager"])
        self.last_loss = losses["planned"].item()


def _step(case: DemoCase, model: nn.Module, batch: Mapping[str, torch.Tensor], seed: int) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = case.loss(model, batch)
    loss.backward()
    return loss.detach()


def _peak_bytes(case: DemoCase, model: nn.Module, batch: Mapping[str, torch.Tensor], seed: int) -> int:
    """Of forward and backward."""
    model.zero_grad(set_to_none=True)  # the profiler does not see the release of what was there before
    return measure_peak(lambda: _step(case, model, batch, seed), resident=[model, dict(batch)]).peak_bytes


def _equal_gradients(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(
        first_name == second_name
        and first.grad is not None
        and second.grad is not None
        and same_bits(first.grad, second.grad)
        for (first_name, first), (second_name, second) in pairs
    )
