"""Models in which the samples of a batch see each other.

BatchNorm takes its statistics from the batch at hand, so a model that has one computes something else on
micro-batches than on the whole. What mixes samples elsewhere (a contrastive loss) cannot be seen from outside.
"""

from torch import nn

from memfit.errors import InvalidInput

_MIXING = nn.modules.batchnorm._BatchNorm


def check_separable(model: nn.Module) -> None:
    """Refuse to cut the batches of a model that mixes samples."""
    for name, module in model.named_modules():
        if isinstance(module, _MIXING) and (module.training or module.running_mean is None):
            raise InvalidInput(
                f"the batch cannot be cut exactly: {name or 'the model'!r} ({type(module).__name__}) takes its "
                "statistics over the batch at hand, so micro-batches and accumulated batches give other numbers; put "
                'it in eval(), use GroupNorm, or accept that with allow=("batch-statistics",)'
            )
