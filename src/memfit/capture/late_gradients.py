"""Gradients of weights that are much bigger than what they are made of are computed at the end of the backward pass.

Note [Late gradients]
    A fully connected layer of many weights makes a gradient of hundreds of megabytes from a few: the layer's input and
    the gradient of its output. In the eager order it then lives while all layers before that one run. In a captured
    backward pass gradients leave together, at the end; so what they are made of is kept instead, and they are computed
    when the activations are gone. The numbers are the same.
"""

from torch import fx

from memfit.capture.nodes import behind_views, is_operator, is_random, is_view, shows, tensors_of
from memfit.capture.trace import Joint
from memfit.ops.lean import is_backward
from memfit.tensors import storage_key

_MUCH = 4  # times as big as what it is made of
_SMALLEST_BYTES = 2**20


def compute_gradients_late(joint: Joint) -> None:
    """See Note [Late gradients]."""
    graph = joint.graph_module.graph
    output = graph.output_node()
    for node in [each for each in graph.nodes if _is_better_late(each)]:
        for each in [node, *_shown_by(node)]:
            output.prepend(each)
    graph.lint()


def _is_better_late(node: fx.Node) -> bool:
    if not is_operator(node) or not is_backward(node) or is_random(node) or is_view(node) or not _is_handed_out(node):
        return False
    made = {storage_key(each): each.untyped_storage().nbytes() for each in tensors_of(node)}
    read = {
        storage_key(each): each.untyped_storage().nbytes()
        for source in node.all_input_nodes
        if not _is_there_anyway(source)
        for each in tensors_of(source)
    }
    return sum(made.values()) >= max(_SMALLEST_BYTES, _MUCH * sum(read.values()))


def _is_there_anyway(node: fx.Node) -> bool:
    """Whether it lives as long as the step: what the backward pass starts from does not."""
    source = behind_views(node)
    return source.op == "placeholder" and type(source.meta.get("desc")).__name__ != "TangentAOTInput"


def _is_handed_out(node: fx.Node) -> bool:
    """Whether it is a result, itself or through views, and nobody else reads it."""
    return bool(node.users) and all(
        user.op == "output" or (shows(user) and _is_handed_out(user)) for user in node.users
    )


def _shown_by(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for user in node.users:
        if user.op != "output":
            found += [user, *_shown_by(user)]
    return found
