"""Learn which samples to trust: data reweighting on long-tailed images.

A classifier trains on long-tailed data with a weight for each sample; a small network learns the weights (from how
rare a sample's class is, or from its loss), so that the classifier does well on a few balanced samples. By default:
generated images, a small network, three seeds, half a minute on a CPU. The full size, with CIFAR-10 in --data:

    python examples/reweighting.py --data ./data --steps 10000

Under torchrun it trains data-parallel.
"""

import argparse
import copy
import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.cli.torchvision_repair import prepare
from memfit.multilevel import Config, Engine, EngineConfig, ImplicitProblem

parser = argparse.ArgumentParser()
parser.add_argument("--data", help="folder with CIFAR-10; without, images are generated")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--weigh-by", choices=["rarity", "loss"], default="rarity", help="what the weights are made from")
parser.add_argument("--seeds", type=int, default=3)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
parser.add_argument("--budget", help="peak of a step of the classifier, for example 6GiB")
options = parser.parse_args()
logging.basicConfig(level=logging.INFO, format="%(message)s")
device = "cuda" if torch.cuda.is_available() else "cpu"

if not options.data:
    torch.set_num_threads(1)  # images this small are slower on several

classes = 10
imbalance = 100  # samples of the most frequent class for one of the rarest
balanced_per_class = 20  # samples for the upper problem; CIFAR-10: 100
batch_size = 100
pixels = 32 if options.data else 8


def cifar10():
    """Training and test images of CIFAR-10, as tensors."""
    prepare()  # torchvision's wheel beside a CPU build of torch
    from torchvision.datasets import CIFAR10

    mean, deviation = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
    parts = []
    for train in (True, False):
        dataset = CIFAR10(options.data, train=train, download=True)
        images = (torch.from_numpy(dataset.data).float() / 255 - mean) / deviation
        parts.append((images.permute(0, 3, 1, 2).contiguous(), torch.tensor(dataset.targets)))
    return parts


def generated():
    """Images of one blurred pattern for each class, with noise and shifts."""
    patterns = F.interpolate(torch.randn(classes, 3, 4, 4), size=(pixels, pixels), mode="bilinear")

    def draw(count):
        labels = torch.arange(classes).repeat_interleave(count // classes)
        images = patterns[labels] + 2.5 * torch.randn(len(labels), 3, pixels, pixels)
        shifts = torch.randint(-1, 2, (len(labels),)).tolist()
        return torch.stack([image.roll(shift, 2) for image, shift in zip(images, shifts, strict=True)]), labels

    return draw(30000), draw(2000)


def long_tailed(images, labels):
    """Split off a few balanced samples, and thin the rest out exponentially by class."""
    balanced, tail = [], []
    kept = 100 if options.data else balanced_per_class
    for number in range(classes):
        places = (labels == number).nonzero().flatten()
        places = places[torch.randperm(len(places))]
        balanced.append(places[:kept])
        wanted = int((len(places) - kept) / imbalance ** (number / (classes - 1)))
        tail.append(places[kept : kept + max(wanted, 1)])
    tail, balanced = torch.cat(tail), torch.cat(balanced)
    return TensorDataset(images[tail], labels[tail]), TensorDataset(images[balanced], labels[balanced])


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, images):
        return F.relu(self.layers(images) + self.shortcut(images))


def resnet50():
    """ResNet-50 for images of 32 pixels."""
    layers = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            layers.append(Bottleneck(channels, width, stride if number == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def small_network():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * (pixels // 2) ** 2, classes),
    )  # fmt: skip


class Classifier(ImplicitProblem):
    def training_step(self, batch):
        images, labels = batch
        losses = F.cross_entropy(self(images), labels, reduction="none")
        seen = losses.detach().float() if options.weigh_by == "loss" else rarity[labels]
        weights = self.reweight(seen.unsqueeze(1)).squeeze(1)
        return (weights * losses).sum() / weights.sum()


class Plain(ImplicitProblem):
    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self(images), labels)


class Reweight(ImplicitProblem):
    def training_step(self, batch):
        images, labels = batch
        scores = self.classifier(images)
        return {"loss": F.cross_entropy(scores, labels), "accuracy": (scores.argmax(1) == labels).float().mean()}


@torch.no_grad()
def balanced_accuracy(module, images, labels):
    """Accuracy over test data in which every class is equally frequent."""
    module.eval()
    found = torch.cat([module(part.to(device)).argmax(1).cpu() for part in images.split(500)])
    module.train()
    return float((found == labels).float().mean())


def classifier_problem(kind, network, data, **settings):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    config = Config(
        type="darts",
        gradient_accumulation=options.accumulation,
        precision=options.precision,
        budget=options.budget,
        **settings,
    )
    loader = DataLoader(data, batch_size=batch_size // options.accumulation, shuffle=True)
    return kind("classifier", config, network, optimizer, schedule, loader, device)


gains = []
for seed in range(options.seeds):
    torch.manual_seed(seed)
    (train_images, train_labels), (test_images, test_labels) = cifar10() if options.data else generated()
    tail, balanced = long_tailed(train_images, train_labels)
    counts = torch.bincount(tail.tensors[1], minlength=classes)
    rarity = (counts.max() / counts).log().to(device)  # of each class: 0 for the most frequent one
    network = resnet50() if options.data else small_network()
    start = copy.deepcopy(network.state_dict())
    engine_config = EngineConfig(train_iters=options.steps, valid_step=10**9, distributed=True)

    plain = classifier_problem(Plain, network, tail)
    Engine([plain], engine_config).run()
    accuracy_plain = balanced_accuracy(network, test_images, test_labels)

    network.load_state_dict(start)
    classifier = classifier_problem(Classifier, network, tail)
    weigher = nn.Sequential(nn.Linear(1, 100), nn.ReLU(), nn.Linear(100, 1), nn.Sigmoid())
    reweight = Reweight(
        "reweight",
        Config(log_step=200, precision=options.precision),
        weigher,
        torch.optim.Adam(weigher.parameters(), lr=1e-2),
        None,
        DataLoader(balanced, batch_size=batch_size, shuffle=True),
        device,
    )
    dependencies = {"u2l": {reweight: [classifier]}, "l2u": {classifier: [reweight]}}
    engine = Engine([reweight, classifier], engine_config, dependencies)
    print(engine.estimate())
    engine.run()
    accuracy = balanced_accuracy(network, test_images, test_labels)
    gains.append(accuracy - accuracy_plain)
    print(f"seed {seed}: balanced accuracy {accuracy_plain:.1%} plain, {accuracy:.1%} with learned weights")
print(f"mean gain {100 * sum(gains) / len(gains):.1f} points")
