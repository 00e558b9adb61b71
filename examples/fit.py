"""Train ResNet-50 in half of its activation memory: plan, prove, measure, train.

Run it with `make demo`. Times are those of this machine; a busy one gives noisy ratios.
"""

import torch
import torch.nn.functional as F
from rich.console import Console

import memfit
from memfit.cli.torchvision_repair import prepare
from memfit.units import format_bytes

prepare()  # torchvision's wheel beside a CPU build of torch
import torchvision

batch_size = 8
pixels = 128
fraction = 0.5  # of what the unplanned step has beyond parameters, gradients and batch

console = Console()
torch.manual_seed(0)
model = torchvision.models.resnet50()
images, labels = torch.randn(batch_size, 3, pixels, pixels), torch.randint(1000, (batch_size,))

# 1. How much would the plain step take?
with console.status("capturing the model and measuring its operators"):
    estimate = memfit.estimate(model, images)
parameters = sum(each.numel() * each.element_size() for each in model.parameters())
persistent = 2 * parameters + images.nbytes  # parameters, gradients, batch
budget = persistent + int(fraction * (estimate.peak_bytes - persistent))
console.print(f"unplanned peak {format_bytes(estimate.peak_bytes)}, budget {format_bytes(budget)}")

# 2. The fastest schedule under the budget, and how far from the best possible it can be.
with console.status("planning"):
    plan = memfit.plan(model, images, budget=budget)
console.print(str(plan), highlight=False)

# 3. Are the numbers the same? Loss, gradients, buffers, generator, against the eager run.
with console.status("checking against the eager run"):
    check = memfit.check(model, plan, images)
console.print(str(check), highlight=False)

# 4. Is the peak what was predicted, and the time?
with console.status("measuring"):
    profile = memfit.profile(model, plan, images, eager=True)
console.print(str(profile), highlight=False)

# 5. Train. The model is the same object; nothing else of the script changes.
memfit.apply(plan, model, images)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    console.print(f"step {step}: loss {loss.item():.3f}")

if not (check.passed and profile.fits):
    raise SystemExit("the plan does not keep its promises")
