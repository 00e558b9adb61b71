"""Settings of a problem and of the engine, in the words multilevel users know."""

import dataclasses
from typing import Any, Literal

from memfit.errors import InvalidInput
from memfit.multilevel.hypergradient import METHODS
from memfit.step.policy import StepPolicy

Precision = Literal["fp32", "fp16", "bf16"]

_PRECISIONS = ("fp32", "fp16", "bf16")
_CHECKPOINTS = ("step", "sqrt")
_STRATEGIES = ("default", "distributed")
_LOGGERS = ("none", "tensorboard", "wandb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How one problem is solved, how those above it differentiate through it, and what memory it may use."""

    type: str = "darts"  # how uppers differentiate through this problem; see `METHODS`
    unroll_steps: int = 1  # steps of this problem before those above it make one
    first_order: bool | None = None  # False: differentiate through the steps themselves; True: drop second derivatives
    warmup_steps: int = 0  # steps of this problem before those above it start
    retain_graph: bool = False  # accepted for programs that set it; nothing here needs it
    allow_unused: bool = True  # False: refuse a loss that does not use every parameter of this problem

    gradient_accumulation: int = 1  # batches drawn for one step; their gradients make one, and uppers see them all
    gradient_clipping: float = 0.0  # greatest norm of the gradient; 0 for none
    precision: Precision = "fp32"
    fp16: bool = False  # the same as precision="fp16"
    initial_dynamic_scale: float = 4096.0  # where loss scaling starts under fp16
    scale_factor: float = 2.0  # how it grows
    update: str = "after"  # the backward pass; "inside" it: a gradient is used and dropped as soon as it is complete
    state_tier: str | None = None  # where the optimizer's state is: None (beside the parameters), "host" or "disk"
    directory: str | None = None  # of the state, if it is on disk
    budget: int | float | str | None = None  # peak of a step of this module: bytes, "6GiB", a fraction, "smallest"

    log_step: int = -1  # log every so many steps of this problem; -1 for never
    log_local_step: bool = False  # log over this problem's own steps instead of the engine's

    darts_alpha: float = 0.01  # length of the finite difference
    sama_alpha: float = 0.01
    neumann_iterations: int = 1  # terms after the first
    neumann_alpha: float = 1.0  # step of the series; at most 1 / the greatest curvature
    cg_iterations: int = 1
    cg_alpha: float = 1.0  # scale of the curvature inside the solver; changes rounding, not the result
    cg_damping: float = 0.0  # added to the curvature
    cg_tolerance: float = 1e-10  # stop at this residual, relative to the vector
    nystrom_rank: int = 10  # columns of the sketch
    nystrom_damping: float = 0.01  # curvature outside the sketch; 0 drops what the sketch does not see
    unroll_checkpoint: Literal["step", "sqrt"] = "step"  # states kept: of every step, or of every √T-th
    unroll_truncation: int = 0  # differentiate the last so many steps only; 0 for all
    reinforce_baseline: float = 0.9  # how slowly the running mean of losses follows; 0 for no baseline

    def __post_init__(self) -> None:
        if self.type not in METHODS:
            raise InvalidInput(f"Config(type={self.type!r}) names no method; there are {', '.join(METHODS)}")
        _check_among("precision", self.precision, _PRECISIONS)
        _check_among("unroll_checkpoint", self.unroll_checkpoint, _CHECKPOINTS)
        for name in ("unroll_steps", "gradient_accumulation", "cg_iterations", "nystrom_rank"):
            _check_at_least(self, name, 1)
        for name in ("warmup_steps", "gradient_clipping", "neumann_iterations", "unroll_truncation"):
            _check_at_least(self, name, 0)
        for name in ("cg_damping", "cg_tolerance", "nystrom_damping"):
            _check_at_least(self, name, 0)
        for name in ("darts_alpha", "sama_alpha", "neumann_alpha", "cg_alpha", "initial_dynamic_scale"):
            _check_positive(self, name)
        if not 0 <= self.reinforce_baseline < 1:
            raise InvalidInput(f"reinforce_baseline must be in [0, 1), {self.reinforce_baseline} was given")
        if self.fp16 and self.precision == "bf16":
            raise InvalidInput('Config(fp16=True, precision="bf16") names two precisions; leave one out')
        _ = self.step_policy  # which checks it

    @property
    def step_policy(self) -> StepPolicy:
        """How a step of this problem changes its parameters."""
        return StepPolicy(
            update=self.update,
            state_tier=self.state_tier,
            directory=self.directory,
            clip_norm=self.gradient_clipping or None,
            precision="fp16" if self.chosen_precision == "fp16" else None,
        )

    @property
    def chosen_precision(self) -> Precision:
        """What `precision` and `fp16` say together."""
        return "fp16" if self.fp16 else self.precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How long the whole program runs, and how it is watched."""

    train_iters: int = 50000  # steps of the lowest problems
    valid_step: int = 500  # `Engine.validation` every so many
    logger_type: str = "none"  # "tensorboard" or "wandb" beside Python's logging
    logger_dir: str | None = None  # where TensorBoard's files go
    roll_back: bool = False  # after an upper step, redo the lower step from where the inner loop started
    progress: bool = False  # a bar in the terminal

    distributed: bool = False  # data parallel over the processes that torchrun started
    strategy: str = "default"  # "distributed" is the same as distributed=True
    backend: str | None = None  # of torch.distributed; nccl where the problems are on CUDA, else gloo

    early_stopping: bool = False
    early_stopping_metric: str = "loss"  # a key of what `validation` returns
    early_stopping_mode: Literal["min", "max"] = "min"
    early_stopping_tolerance: int = 5  # validations without improvement

    def __post_init__(self) -> None:
        _check_among("strategy", self.strategy, _STRATEGIES)
        _check_among("logger_type", self.logger_type, _LOGGERS)
        _check_among("early_stopping_mode", self.early_stopping_mode, ("min", "max"))
        _check_at_least(self, "train_iters", 0)
        for name in ("valid_step", "early_stopping_tolerance"):
            _check_at_least(self, name, 1)

    @property
    def is_distributed(self) -> bool:
        """What `distributed` and `strategy` say together."""
        return self.distributed or self.strategy == "distributed"


def _check_among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidInput(f"{name}={value!r} is not known; there are {', '.join(known)}")


def _check_at_least(config: Any, name: str, least: int) -> None:
    if getattr(config, name) < least:
        raise InvalidInput(f"{name} must be at least {least}, {getattr(config, name)} was given")


def _check_positive(config: Any, name: str) -> None:
    if not getattr(config, name) > 0:
        raise InvalidInput(f"{name} must be greater than 0, {getattr(config, name)} was given")
