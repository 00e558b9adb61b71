"""One optimization problem of a multilevel program: what users subclass."""

import abc
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import InvalidInput
from memfit.multilevel.configs import Config
from memfit.multilevel.data import LoaderCursor, moved, split_over_ranks
from memfit.multilevel.hypergradient import METHODS
from memfit.multilevel.hypergradient.method import Solver
from memfit.multilevel.inner_loop import inner_loop_state, load_inner_loop
from memfit.multilevel.precision import Mixed
from memfit.multilevel.records import Snapshot, StepRecord
from memfit.multilevel.updates import make_updater
from memfit.step.updater import Updater

if TYPE_CHECKING:
    from memfit.multilevel.engine import Engine

log = logging.getLogger(__name__)


class Problem(abc.ABC):
    """Parameters, a loss, an optimizer and data; other problems are reached by their names (`self.classifier`).

    Give module, optimizer, scheduler and loaders here, or override `configure_module`, `configure_optimizer`,
    `configure_scheduler` and `configure_train_data_loader`. Several loaders are given as a tuple; a batch is
    then a tuple of theirs.
    """

    def __init__(
        self,
        name: str,
        config: Config | None = None,
        module: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        train_data_loader: Any = None,
        device: str | torch.device | None = None,
        extra_config: Any = None,
    ) -> None:
        self.name = name
        self.config = config if config is not None else Config()
        self.module: Any = module  # an nn.Module once the engine has initialized it
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.train_data_loader = train_data_loader
        self.extra_config = extra_config
        self.device: str | torch.device | None = device
        self.engine: Engine
        self.env: Any = None  # what the engine was given for its problems to share
        self.count = 0  # steps made
        self.parameter_list: list[nn.Parameter] = []  # trainable, as they were when the engine was made
        self.cursors: list[LoaderCursor] = []
        self.mixed: Mixed
        self.updater: Updater | None = None  # changes the parameters in the optimizer's place
        self.record: StepRecord | None = None  # the last step, for those above
        self.trajectory: list[StepRecord] = []  # the steps of this inner loop, where they are differentiated
        self.inner_loop_start = True
        self.is_known_twice_differentiable = False
        self.snapshot: Snapshot | None = None  # of the start of the inner loop, to roll back to
        self.score: dict[Problem, list[torch.Tensor]] = {}  # of uppers, where the method is `reinforce`
        self.baseline: dict[str, torch.Tensor] = {}  # running mean of the upper losses, by the name of the upper

    # What users write.

    @abc.abstractmethod
    def training_step(self, batch: Any) -> Any:
        """The loss on a batch: a scalar tensor, or a dict with it under "loss" and metrics beside it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What calling the problem does."""
        return self.module(*args, **kwargs)

    def configure_module(self) -> nn.Module | None:
        return None

    def configure_optimizer(self) -> Optimizer | None:
        return None

    def configure_scheduler(self) -> Any:
        return None

    def configure_train_data_loader(self) -> Any:
        return None

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """What the optimizer changes; asked for once."""
        return (parameter for parameter in self.module.parameters() if parameter.requires_grad)

    def on_inner_loop_start(self) -> None:  # noqa: B027  (a hook that need not be there)
        """Called before the first step after those above have made theirs."""

    def on_epoch_end(self) -> None:  # noqa: B027  (a hook that need not be there)
        """Called when the first loader has given all its batches."""

    # grad_callback(self[, parameters]), param_callback(self[, parameters]): if a problem has them, they are
    # called when gradients are complete, and when the parameters have changed.
    # update(self, parameters, gradients) -> parameters: if a problem has it, it takes the optimizer's place; it
    # may use other problems, and where this problem is differentiated by its steps they get their gradient.
    # initial_parameters(self) -> tensors: if a problem has it, every inner loop starts from them.

    # What the engine and the methods call.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @property
    def method(self) -> str:
        """How those above differentiate through this problem."""
        return "unrolled" if self.config.first_order is False else self.config.type

    @property
    def is_second_order(self) -> bool:
        return METHODS[self.method].second_order and self.config.first_order is not True

    @property
    def solver(self) -> Solver | None:
        """Solves with this problem's curvature, if its method does."""
        make = METHODS[self.method].solver
        return None if make is None else make(self.config)

    def answers_as_a_whole_with(self, lower: "Problem") -> bool:
        """Whether a change of this problem is answered by a lower one that it uses; see `hypergradient/total.py`."""
        return self in lower.uppers and self.solver is not None and lower.solver is not None

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device or "cpu")

    @property
    def lowers(self) -> Sequence["Problem"]:
        return self.engine.dependencies.used_lowers[self]

    @property
    def uppers(self) -> Sequence["Problem"]:
        return self.engine.dependencies.used_uppers[self]

    def parameters(self) -> Iterable[nn.Parameter]:
        every: Iterable[nn.Parameter] = self.module.parameters()
        return every

    @property
    def updates_inside(self) -> bool:
        """Whether parameters change while gradients are computed, see Note [Inside a level] in `updates.py`."""
        return self.updater is not None and self.config.update == "inside"

    def is_implemented(self, name: str) -> bool:
        return callable(getattr(self, name, None))

    def initialize(self, engine: "Engine") -> None:
        """Make what the problem was not given, and check what it was."""
        self.engine = engine
        self.env = engine.env
        self._make_module()
        self.parameter_list = list(self.trainable_parameters())
        self.optimizer = self.optimizer or self.configure_optimizer()
        self.scheduler = self.scheduler or self.configure_scheduler()
        self._check_optimizer()
        self._make_cursors()
        self.updater = make_updater(self)
        config = self.config
        self.mixed = Mixed(
            config.chosen_precision,
            self.torch_device.type,
            initial_scale=config.initial_dynamic_scale,
            growth=config.scale_factor,
        )

    def _make_module(self) -> None:
        if self.module is None:
            self.module = self.configure_module()
        if not isinstance(self.module, nn.Module):
            raise InvalidInput(
                f"the problem {self.name!r} has no module; give module=, or return one from configure_module"
            )
        if self.device is None:
            tensors = (*self.module.parameters(), *self.module.buffers())
            self.device = str(tensors[0].device) if tensors else "cpu"
        self.module.to(self.torch_device)
        self.engine.ranks.start_equal(self.module)

    def _check_optimizer(self) -> None:
        if self.optimizer is None:
            if self.parameter_list and not self.is_implemented("update"):
                raise InvalidInput(
                    f"the problem {self.name!r} has parameters but no optimizer; give optimizer=, or return one "
                    "from configure_optimizer"
                )
            return
        own = {id(parameter) for parameter in self.parameter_list}
        held = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        if not own & held:
            raise InvalidInput(
                f"the optimizer of the problem {self.name!r} holds none of its module's parameters; make it from "
                f"{self.name}.module.parameters() after the module has been moved or wrapped"
            )

    def _make_cursors(self) -> None:
        if self.train_data_loader is None:
            self.train_data_loader = self.configure_train_data_loader()
        if self.train_data_loader is None:
            if type(self).get_batch is Problem.get_batch:
                raise InvalidInput(
                    f"the problem {self.name!r} has no data; give train_data_loader= (a list of batches will do), "
                    "return one from configure_train_data_loader, or override get_batch"
                )
            return
        several = isinstance(self.train_data_loader, tuple)
        loaders = self.train_data_loader if several else (self.train_data_loader,)
        ranks = self.engine.ranks
        if ranks.several:
            loaders = tuple(split_over_ranks(each, ranks.rank, ranks.world_size, self.name) for each in loaders)
        self.cursors = [LoaderCursor(loader, self.name) for loader in loaders]

    def get_batch(self) -> Any:
        """The next batch, on the problem's device."""
        batches = []
        for number, cursor in enumerate(self.cursors):
            batches.append(cursor.draw(self.on_epoch_end if number == 0 else _nothing))
        batch = batches[0] if len(batches) == 1 else tuple(batches)
        return moved(batch, self.torch_device)

    def peek(self) -> Any:
        """A batch like the next one; loaders and generators stay where they are."""
        if not self.cursors:
            return self.get_batch()
        batches = [cursor.peek() for cursor in self.cursors]
        return moved(batches[0] if len(batches) == 1 else tuple(batches), self.torch_device)

    def loss_of(self, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """The checked loss on a batch in the problem's precision, and the metrics beside it."""
        with self.mixed.autocast():
            result = self.training_step(batch)
        metrics = {key: value for key, value in result.items() if key != "loss"} if isinstance(result, dict) else {}
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, torch.Tensor):
            raise InvalidInput(
                f"training_step of the problem {self.name!r} returned {type(loss).__name__}; return the loss as a "
                'tensor, or a dict that has it under "loss"'
            )
        if loss.numel() != 1:
            raise InvalidInput(
                f"the loss of the problem {self.name!r} has the shape {tuple(loss.shape)}; return a scalar, for "
                "example loss.mean()"
            )
        return loss.reshape(()), metrics

    def call_back(self, name: str) -> None:
        """Call a hook if the problem has it, with the parameters if it takes them."""
        hook: Callable[..., Any] | None = getattr(self, name, None)
        if hook is None:
            return
        if inspect.signature(hook).parameters:
            hook(self.parameter_list)
        else:
            hook()

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def state_dict(self) -> dict[str, Any]:
        """Everything of this problem that a step changes."""
        if self.updater is not None:
            self.updater.settle()
        state: dict[str, Any] = {
            "module": self.module.state_dict(),
            "count": self.count,
            "inner_loop_start": self.inner_loop_start,
            "loaders": [cursor.state_dict() for cursor in self.cursors],
            "baseline": dict(self.baseline),
            "inner_loop": inner_loop_state(self),
        }
        for name, part in self._parts_with_state():
            state[name] = part.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.count = state["count"]
        self.inner_loop_start = state["inner_loop_start"]
        self.baseline = dict(state["baseline"])
        for cursor, kept in zip(self.cursors, state["loaders"], strict=True):
            cursor.load_state_dict(kept)
        for name, part in self._parts_with_state():
            if name not in state:
                raise InvalidInput(
                    f"the saved problem {self.name!r} has no {name}, this one has; resume with the same set-up"
                )
            part.load_state_dict(state[name])
        if self.updater is not None:
            for parameter in self.parameter_list:
                self.updater.adopt(parameter)
        load_inner_loop(self, state["inner_loop"])

    def _parts_with_state(self) -> list[tuple[str, Any]]:
        parts = (("optimizer", self.optimizer), ("scheduler", self.scheduler), ("scaler", self.mixed.scaler))
        return [(name, part) for name, part in parts if part is not None]


class ImplicitProblem(Problem):
    """A problem whose uppers differentiate through its solution, by the method that `Config.type` names."""


class IterativeProblem(Problem):
    """A problem whose uppers differentiate through the steps that it made.

    `Config(first_order=True)` drops second derivatives: only what the steps started from counts.
    """

    @property
    def method(self) -> str:
        return "unrolled"


def _nothing() -> None:
    pass
