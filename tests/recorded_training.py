"""A small training step on the simulated allocator: parameters, activations, gradients, a leak, and a refusal."""

from recorded import Recorder

from memfit.plan.allocator.history import Action, Event, MemoryHistory

MIB = 2**20
FRAMES = (
    "at::native::empty < torch/nn/modules/linear.py:99:__init__ < app/train.py:3:make_model",
    "at::native::linear < torch/nn/modules/linear.py:117:forward < model/block.py:20:forward < app/train.py:9:main",
    "at::native::bmm < torch::autograd::generated::BmmBackward0::apply",
    "at::native::clone < app/train.py:12:log",
)
PARAMETER, FORWARD, BACKWARD, LEAK = range(4)


def record(settings: str = "", steps: int = 3) -> Recorder:
    recorder = Recorder(settings)
    for _ in range(4):
        recorder.allocate(12 * MIB, PARAMETER)
    for _ in range(steps):
        activations = [recorder.allocate((6 + index) * MIB, FORWARD) for index in range(4)]
        gradients = []
        for address in reversed(activations):
            gradients.append(recorder.allocate(12 * MIB, BACKWARD))
            recorder.free(address)
        recorder.allocate(700_000, LEAK)
        for address in gradients:
            recorder.free(address)
    return recorder


def training(settings: str = "", *, skip: int = 0) -> MemoryHistory:
    return record(settings).history(skip=skip, frames=FRAMES)


def refused(settings: str = "") -> MemoryHistory:
    """The same, and a last request that the device has no room for."""
    recorder = record(settings)
    recorder.device.events.append(Event(Action.OUT_OF_MEMORY, 8 * MIB, 90 * MIB, 0, FORWARD))
    return recorder.history(frames=FRAMES)
