"""Plans of earlier runs, on disk: the same model, batch and wishes, on the same machine, take the plan that is there.

Note [What is the same]
    A plan is found by hashes of all that decides it. Before a model is captured that is the model's parameters, the
    sample, the recipe, the versions of memfit and torch, what was set in torch, the processor and how many threads it
    runs: the folder. Afterwards it is every operation of the captured graph with its arguments, the sizes of all
    values, and what the optimizer and a loss outside need: the file. So a model whose code was changed does not find
    the plan it had before. The plans of a folder say in which layout to capture, and for which kernels: as a rule that
    is done once.
"""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.accelerator import is_accelerator, name_of_device
from memfit.capture.sample import Sample
from memfit.describe import describe_sample, device_of, model_digest
from memfit.errors import InvalidFile, first_line
from memfit.files import cache_folder, hash_of, own_version
from memfit.ir import Compute, Graph, LossMemory, OptimizerMemory, Program
from memfit.machine import processor
from memfit.measure.probe import kernel_settings
from memfit.ops.registry import find_function, in_place_function
from memfit.ops.stretch import Stretch, compile_all
from memfit.plan.plan import Plan
from memfit.plan.select import Selection
from memfit.plan.validate import check_program
from memfit.recipe import Recipe

log = logging.getLogger(__name__)

_FORMAT = 3  # to be raised when plans of before are not as good, or not as right, as those made now


def folder_of(recipe: Recipe, model: nn.Module, sample: Sample) -> Path:
    """Where plans for a wish are, see Note [What is the same]."""
    words = [
        [
            _FORMAT,
            own_version(),
            torch.__version__,
            processor(),
            os.cpu_count(),
            torch.get_num_threads(),
            kernel_settings(),
        ],
        [_device_words(model), model_digest(model), describe_sample(sample)],
        [recipe.budget, recipe.allow, recipe.outputs, recipe.backward_from, recipe.time_limit_s],
        [_selection_words(each) for each in recipe.recompute],
        [_selection_words(each) for each in recipe.keep],
    ]
    return cache_folder() / "plans" / f"{type(model).__name__}-{hash_of(words)[:24]}"


def place_in(folder: Path, graph: Graph, optimizer: OptimizerMemory, loss: LossMemory | None = None) -> Path:
    """The file of a plan for a graph, see Note [What is the same]."""
    operations = (*graph.operations, *graph.alternatives)
    words = [
        # Signatures without their operators, of which they say whether they are compiled in this process.
        [[each.target, each.signature.partition(",")[2]] for each in operations],
        [graph.digest(), [each.size_bytes for each in graph.storages]],
        dataclasses.astuple(optimizer),
        *([] if loss is None else [dataclasses.astuple(loss)]),
    ]
    return folder / f"{hash_of(words)[:24]}.json"


def kept_plans(folder: Path) -> dict[Path, Plan]:
    """The plans of a folder that can be read, the newest first."""
    try:
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError as error:
        log.warning("plans of earlier runs in %s cannot be looked at (%s); planning again", folder, first_line(error))
        return {}
    return {path: plan for path in paths if (plan := _read_plan(path)) is not None}


def _read_plan(path: Path) -> Plan | None:
    try:
        return Plan.load(path)
    except (InvalidFile, OSError) as error:
        log.warning("the plan that was remembered in %s is damaged (%s) and left out", path, first_line(error))
        return None


def keep_plan(path: Path, plan: Plan) -> None:
    """Keep a plan for later runs, if its costs were measured and its search came to an end.

    What cannot be written is not an error.
    """
    if plan.was_interrupted or not plan.times_measured:
        return
    try:
        plan.save(path)
    except OSError as error:
        log.warning("the plan could not be remembered (%s)", error)


def can_run_as_planned(graph: Graph, program: Program) -> bool:
    """Whether a program is for a graph, and all its stretches can be compiled: others take more than was counted."""
    try:
        check_program(graph, program)
    except InvalidFile as error:
        log.warning("the plan that was remembered is not for this model (%s); planning again", first_line(error))
        return False
    forms = []
    for run in (*program.forward, *program.backward):
        if isinstance(run, Compute):
            function = find_function(graph.operation(run.operation).target)
            forms.append(in_place_function(function) if run.in_place else function)
    stretches = [form for form in forms if isinstance(form, Stretch)]
    compile_all(stretches)
    return not any(stretch.failure for stretch in stretches)


def _selection_words(selection: Selection) -> str:
    named: Any = selection
    return f"{named.__module__}.{named.__qualname__}" if isinstance(selection, type) else repr(selection)


def _device_words(model: nn.Module) -> str:
    device = device_of(model)
    return f"{device} {name_of_device(device)}" if is_accelerator(device) else device
