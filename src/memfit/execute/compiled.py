"""One captured call of a module, ready to run."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from memfit import _torch
from memfit.capture.blame import BUGS, failed_running, is_of_the_model
from memfit.capture.guards import Guards
from memfit.capture.numbers import Numbers
from memfit.capture.trace import Joint
from memfit.collecting import collected_later
from memfit.errors import ExecutionError
from memfit.execute.around_backward import AroundBackward
from memfit.execute.arrivals import Arrivals
from memfit.execute.arriving_layouts import ArrivingLayouts
from memfit.execute.codegen import OVERWRITES, generate
from memfit.execute.collapse_views import collapse_views
from memfit.execute.gradient_order import GradientOrder
from memfit.execute.inner_outputs import refuse_gradients
from memfit.execute.kept_gradients import KeptGradients
from memfit.execute.partition import planned_partition, unplanned_program
from memfit.execute.turns import without_double_turns
from memfit.execute.unchanged import read_again
from memfit.execute.uses import SeveralUses
from memfit.ir import Graph, Program
from memfit.ops.inplace import in_place_form
from memfit.ops.stretch import Stretch, compile_all
from memfit.tensors import tensors_in
from memfit.trees import leaves_of

Boxed = Callable[[list[Any]], list[Any]]  # empties the list it is given
Around = Callable[[Boxed], Boxed]
Flat = Callable[[list[Any]], Sequence[Any]]


class CompiledCall:
    """Runs a captured forward; gradients flow through the captured backward."""

    def __init__(
        self,
        joint: Joint,
        graph: Graph,
        program: Program | None = None,
        *,
        kept_gradients: KeptGradients | None = None,
        around_backward: Around | None = None,
    ) -> None:
        """Compile a traced call to run `program`; without one, to run as the eager model does.

        `kept_gradients` looks at the first calls. `around_backward` makes of the captured backward the function that
        runs in its place.
        """
        self._kept_gradients = kept_gradients
        self._results = joint.results
        self._keywords = joint.keywords
        self._differentiated = joint.differentiated
        self._guarded = joint.undifferentiated
        self._inner = joint.inner
        self._unused = [place for place, uses in enumerate(joint.uses) if place >= len(joint.state_names) and not uses]
        self._several = SeveralUses(joint) if any(joint.uses) else None
        self.guards = joint.guards
        self.questions = joint.questions
        self.changes_only_buffers = not joint.changes_arguments and not joint.changes_parameters
        places = _torch.result_places(joint.export)
        self._arrivals = Arrivals.of(joint, places.start)
        self._layouts = ArrivingLayouts(joint, places.start)
        self._around = AroundBackward(joint.name)
        self._is_explained = False
        self._order = GradientOrder(joint)
        self._numbers = joint.numbers if joint.numbers.found else None
        self._late_names = joint.late.names
        late = joint.guards.among(joint.late.names)
        self._read_late = None if late.is_empty() else late
        with collected_later():
            program = program or unplanned_program(graph)
            self._unchanged = read_again(joint, graph, program)
            self._run = self._compiled(joint, graph, program, around_backward)

    def _compiled(self, joint: Joint, graph: Graph, program: Program, around_backward: Around | None) -> Flat:
        def compile_forward(module: fx.GraphModule) -> Boxed:
            compile_all(_stretches_run_by(module.graph))
            without_double_turns(module.graph)
            collapse_views(module.graph)
            return _without_views(generate(module.graph), _torch.result_places(joint.export))

        def compile_backward(module: fx.GraphModule) -> Boxed:
            compile_all(_stretches_run_by(module.graph))
            without_double_turns(module.graph)
            collapse_views(module.graph)
            made = self._generated_backward(module.graph)
            if around_backward is None:
                return made
            function = around_backward(made)
            function._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
            return function

        return _torch.compile_joint(joint.export, planned_partition(graph, program), compile_forward, compile_backward)

    def _generated_backward(self, graph: fx.Graph) -> Boxed:
        """Make a function of a backward graph, or one that chooses between several."""

        def summed(graph: fx.Graph) -> Boxed:
            return generate(graph) if self._several is None else self._several.compiled(graph, generate)

        def arriving(graph: fx.Graph) -> Boxed:
            return summed(graph) if self._arrivals is None else self._arrivals.compiled(graph, summed)

        return self._layouts.compiled(graph, arriving)

    def _cut_off(self, given: list[Any]) -> list[Any]:
        """Take arguments that get no gradient from the graph behind them, which autograd would go through."""
        for place in self._unused:
            each = given[place]
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                given[place] = each.detach()
        return given

    def look_again(self) -> None:
        """Expect other parameters, with other hooks, at the next call."""
        self._order.look_again()

    def __call__(self, states: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Run on the current parameters and buffers (`states`) and the call's arguments."""
        if self._kept_gradients is not None and not self._kept_gradients.look(states):
            self._kept_gradients = None
        ordered = {name: kwargs[name] for name in self._keywords}
        given = (*states, *leaves_of((args, ordered)))
        if self._numbers is not None:
            values = self._numbers.taken()
            self._numbers.put(values)
        slots = {} if self._several is None or not torch.is_grad_enabled() else self._several.slots(given)
        tensors = list(self._run(self._cut_off(self._order.of(given, slots))))
        if self._numbers is not None and torch.is_grad_enabled():
            _numbers_of_backward(self._numbers, values, tensors[self._differentiated[0]], late=self._late_names)
        if not self._is_explained and torch.is_grad_enabled():
            _torch.explained_backward(tensors[self._differentiated[0]], _explained)
            self._is_explained = True
        if self._several is not None and slots:
            self._several.watch(tensors[self._differentiated[0]], given, slots)
        if self._inner and torch.is_grad_enabled():
            refuse_gradients(tensors, self._inner, [each for each in self._differentiated if each not in self._inner])
        if self._read_late is not None and torch.is_grad_enabled():
            _compare_before_backward(self._read_late, tensors[self._differentiated[0]])
        if torch.is_grad_enabled():
            self._layouts.watch(tensors[self._differentiated[0]])
            self._around.watch(tensors[self._differentiated[0]])
        if self._arrivals is not None and torch.is_grad_enabled():
            self._arrivals.watch(tensors[self._differentiated[0]])
        if self._unchanged is not None and torch.is_grad_enabled():
            self._unchanged.watch(given, tensors[self._differentiated[0]])
        if self._guarded:
            start = tensors[self._differentiated[0]]
            for index in self._guarded:
                tensors[index] = _NotDifferentiated.apply(tensors[index], start)
        return self._results.of(tensors, given, args, ordered)


def _compare_before_backward(late: Guards, output: torch.Tensor) -> None:
    """Refuse values that code of the backward pass reads and that have changed since, see `capture/late_reads.py`."""

    def compare(_gradients: Any) -> None:
        if not late.hold():
            raise ExecutionError(_READ_LATE.format(late.change()))

    node = _torch.compiled_node(output)
    if node is not None:
        _torch.before_backward(node, compare)


def _numbers_of_backward(numbers: Numbers, values: list[float], output: torch.Tensor, *, late: Collection[str]) -> None:
    """Let the backward pass find the numbers of its own forward pass; those that are read `late` are to be the same."""

    def put(_gradients: Any) -> None:
        name = numbers.changed_since(values, late)
        if name:
            raise ExecutionError(_READ_LATE.format(f"{name} has changed"))
        numbers.put(values)

    node = _torch.compiled_node(output)
    if node is not None:
        _torch.before_backward(node, put)


def _explained(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The same backward pass; what it cannot do is said in words of the user's."""

    def run(*arguments: Any) -> Any:
        if _torch.is_batched(tensors_in(arguments[1:])):
            raise ExecutionError(
                "gradients are asked for in a batch (is_grads_batched=True, or vectorize=True), which a captured call "
                "cannot do; ask for them one by one, or call memfit.remove(model)"
            )
        try:
            gradients = backward(*arguments)
            for each in gradients:
                if isinstance(each, torch.Tensor) and each.requires_grad:  # create_graph=True
                    _torch.explained_backward(each, _refused_again)
            return gradients
        except BUGS as error:
            if is_of_the_model(error):
                raise
            raise failed_running(error) from error
        except RuntimeError as error:
            if _DETERMINISTIC in str(error):
                raise ExecutionError(
                    "deterministic algorithms were switched between forward and backward; a captured call has those of "
                    "its forward pass: switch them before the forward pass"
                ) from error
            if _WRITTEN not in str(error):
                raise
            raise ExecutionError(
                "a parameter, a buffer, the batch or an output was written into between forward and backward; a "
                "captured call reads it again in its backward pass: write into it after loss.backward(), or a copy "
                f"({str(error).partition(';')[0].partition(_WRITTEN)[2].strip(': ')})"
            ) from error

    return run


def _refused_again(_backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*_arguments: Any) -> Any:
        raise ExecutionError(
            "gradients are to be differentiated again (create_graph=True), which a captured call cannot do; call "
            "memfit.remove(model) for such a loss, or fit the parts that are differentiated once"
        )

    return run


_READ_LATE = (
    "{} between forward and backward; a hook or a function of the backward pass reads it then, and a captured call has "
    "the one of the forward pass: change it before the forward pass"
)
_DETERMINISTIC = "use_deterministic_algorithms"
_WRITTEN = "modified by an inplace operation"


def _stretches_run_by(graph: fx.Graph) -> list[Stretch]:
    """In the form in which they run."""
    forms = [in_place_form(node.target) if node.meta.get(OVERWRITES) else node.target for node in graph.nodes]
    return [form for form in forms if isinstance(form, Stretch)]


def _without_views(forward: Boxed, places: range) -> Boxed:
    """The same pass, whose results autograd does not take for views.

    Where a result was written over a view, as an operation in place does, it is one to autograd, though the eager
    result is not; what hooks itself to results, as FSDP2 does, warns of it. Writes into it are noticed as before.
    """

    def run(arguments: list[Any]) -> list[Any]:
        results = forward(arguments)
        for place in places:
            if isinstance(results[place], torch.Tensor) and results[place]._is_view():
                results[place] = results[place].detach()
        return results

    run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd knows
    return run


class _NotDifferentiated(torch.autograd.Function):
    """An output beside the loss. It requires a gradient like the eager one, and says so if one arrives."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ExecutionError(
            "a gradient arrived at an output beside the loss, but this model was captured with a backward "
            'pass from its loss alone; write memfit.fit(model, sample, ..., backward_from="all"), which differentiates '
            "every output"
        )
