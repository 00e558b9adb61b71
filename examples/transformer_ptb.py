"""A Transformer language model on Penn Treebank text: what checkpointing saves, and what it costs.

Four ways to train the same model, step by step from the same weights and seeds:

    none            plain PyTorch
    LayerNorm, ...  values of one kind of layer are computed again (memfit's recompute=[...])
    segments of n   torch.utils.checkpoint around every n layers
    memfit          planned: the fastest schedule that takes no more than the segments do, and saves at least 55%

against batch size, width of the feed-forward part ("hidden") and segment length. Reported are the peak of a whole step
(parameters, gradients, Adam's state, batch and activations) and the mean time of a batch over three runs.

    python examples/transformer_ptb.py                      one setting, about a minute
    python examples/transformer_ptb.py --full               the whole table
    python examples/transformer_ptb.py --data ~/ptb         on ptb.train.txt in that folder

Without --data a small text is generated: memory and time depend on shapes alone, the loss on the text.
"""

import argparse
import copy
import dataclasses
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.measure.peak import held_bytes, measure_peak

embedding = 128  # numbers a word is made of
heads, head_size = 8, 32  # of attention
dropout = 0.1
learning_rate = 0.003
sequence = 20  # words a sample
vocabulary = 1000  # most frequent words that are told apart; the others are <unk>
least_saving = 0.55  # of the peak: what a plan has to save, if the segments save less
plan_seconds = 8.0


# --- the text ---------------------------------------------------------------------------------------------------------


def penn_treebank(path):
    """Words of a Penn Treebank file, or of ptb.train.txt in a folder; every line ends with <eos>."""
    path = Path(path).expanduser()
    file = path / "ptb.train.txt" if path.is_dir() else path
    if not file.is_file():
        raise SystemExit(f"there is no file {file}; give --data the folder with ptb.train.txt, or the file")
    return [word for line in file.read_text(encoding="utf-8").splitlines() for word in (*line.split(), "<eos>")]


def generated_text(length=200_000, seed=0):
    """Words as frequent as in real text, most decided by the word before, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 1 / torch.arange(1, vocabulary).double()
    drawn = torch.multinomial(frequency, length, replacement=True, generator=generator)
    followers = torch.randint(vocabulary - 1, (vocabulary - 1,), generator=generator)
    follows = torch.rand(length, generator=generator) < 0.7
    words, last = [], 0
    for number, is_follower in zip(drawn.tolist(), follows.tolist(), strict=True):
        last = int(followers[last]) if is_follower else number
        words.append(f"w{last}")
    return words


def numbered(words):
    """Words as numbers; 0 is <unk>."""
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - 1]
    numbers = {word: number for number, word in enumerate(frequent, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def batches(numbers, batch_size):
    """The text cut into as many strips as a batch has samples, read side by side; the target is the next word."""
    strips = numbers[: len(numbers) // batch_size * batch_size].view(batch_size, -1)
    for start in range(0, strips.shape[1] - sequence, sequence):
        words, next_words = (strips[:, start + shift : start + shift + sequence] for shift in (0, 1))
        yield words.contiguous(), next_words.contiguous()


# --- the model --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal attention of several heads, written out: scores, softmax and dropout are values of their own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(embedding)
        self.project_in = nn.Linear(embedding, 3 * heads * head_size, bias=False)
        self.project_out = nn.Linear(heads * head_size, embedding)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("hidden_words", torch.ones(sequence, sequence, dtype=torch.bool).triu(1))

    def forward(self, states):
        batch_size, length, _ = states.shape
        projected = self.project_in(self.norm(states)).view(batch_size, length, 3, heads, head_size)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-1, -2) * head_size**-0.5
        weights = self.dropout(scores.masked_fill(self.hidden_words[:length, :length], -torch.inf).softmax(-1))
        return self.project_out((weights @ values).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(embedding)
        self.widen = nn.Linear(embedding, hidden)
        self.activate = nn.ReLU()
        self.narrow = nn.Linear(hidden, embedding)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states):
        states = states + self.dropout(self.attention(states))
        wide = self.dropout(self.activate(self.widen(self.norm(states))))
        return states + self.dropout(self.narrow(wide))


class LanguageModel(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.words = nn.Embedding(vocabulary, embedding)
        self.places = nn.Embedding(sequence, embedding)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.decoder = nn.Linear(embedding, vocabulary)
        self.segment = 0  # layers under one checkpoint; 0: none

    def forward(self, words, next_words):
        states = self.words(words) + self.places(torch.arange(words.shape[1]))
        if self.segment:
            for start in range(0, len(self.layers), self.segment):
                states = checkpoint(self.run, states, start, start + self.segment, use_reentrant=False)
        else:
            states = self.run(states, 0, len(self.layers))
        return F.cross_entropy(self.decoder(states).flatten(0, 1), next_words.flatten())

    def run(self, states, start, end):
        for layer in self.layers[start:end]:
            states = layer(states)
        return states


# --- ways to train it -------------------------------------------------------------------------------------------------

selected_layers = {"LayerNorm": nn.LayerNorm, "ReLU": nn.ReLU, "Linear": nn.Linear, "attention": Attention}


def plain(model, _sample):
    return model


def by_layer(kind):
    return lambda model, sample: memfit.fit(model, sample, recompute=[kind], optimizer="adam")


def by_segment(length):
    def checkpointed(model, _sample):
        model.segment = length
        return model

    return checkpointed


def planned(budget):
    def fitted(model, sample):
        try:
            return memfit.fit(model, sample, budget=budget, optimizer="adam", time_limit=plan_seconds)
        except memfit.InfeasibleBudget as error:  # the nearest that is there
            smallest = error.smallest_bytes
            return memfit.fit(model, sample, budget=smallest, optimizer="adam", time_limit=plan_seconds)

    return fitted


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Way:
    """One way to train, and what was measured."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer = None
    peak_bytes: int = 0
    lasting_bytes: int = 0  # live when the step ends: parameters, gradients, Adam's state, batch
    seconds: list[float] = dataclasses.field(default_factory=list)  # a batch
    losses: list[float] = dataclasses.field(default_factory=list)

    def step(self, batch, seed):
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def start(self, weights):
        self.model.load_state_dict(weights)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=learning_rate)

    def measure_peak(self, weights, batch):
        self.start(weights)
        self.step(batch, seed=0)  # from the second step on Adam has its state
        self.optimizer.zero_grad()
        measured = measure_peak(lambda: self.step(batch, seed=1), resident=[self.model, self.optimizer, batch])
        gradients = [each.grad for each in self.model.parameters()]
        self.peak_bytes = measured.peak_bytes
        self.lasting_bytes = held_bytes([self.model, self.optimizer, batch, gradients])


@dataclasses.dataclass(frozen=True)
class Setting:
    batch_size: int
    hidden: int
    segment: int
    with_selected_layers: bool


def measured_ways(setting, numbers, options):
    """Train all ways side by side: every batch is run by each of them in turn, so that a busy machine slows all."""
    torch.manual_seed(0)
    original = LanguageModel(setting.hidden, options.layers).train()
    sample = next(batches(numbers, setting.batch_size))
    weights = copy.deepcopy(original.state_dict())

    def way(name, prepare):
        made = Way(name, prepare(copy.deepcopy(original), sample))
        made.measure_peak(weights, sample)
        print(f"  {name}: {made.peak_bytes / 2**20:.1f} MiB", flush=True)
        return made

    print(f"batch {setting.batch_size}, hidden {setting.hidden}", flush=True)
    ways = [way("none", plain)]
    if setting.with_selected_layers:
        ways += [way(name, by_layer(kind)) for name, kind in selected_layers.items()]
    ways.append(way(f"segments of {setting.segment}", by_segment(setting.segment)))
    budget = min(ways[-1].peak_bytes, int((1 - least_saving) * ways[0].peak_bytes))
    ways.append(way("memfit", planned(budget)))
    for run in range(options.runs):
        train(ways, numbers, setting, options, run)
    return ways


def train(ways, numbers, setting, options, run):
    torch.manual_seed(run)
    fresh = LanguageModel(setting.hidden, options.layers).state_dict()
    for way in ways:
        way.start(fresh)
    for epoch in range(options.epochs):
        for number, batch in enumerate(batches(numbers, setting.batch_size)):
            if number == options.batches:
                break
            first = number + epoch
            for place in range(len(ways)):
                way = ways[(first + place) % len(ways)]
                start = time.perf_counter()
                loss = way.step(batch, seed=1000 * run + number)
                way.seconds.append(time.perf_counter() - start)
                way.losses.append(loss.item())


# --- what is shown ----------------------------------------------------------------------------------------------------


def rows_of(setting, ways):
    plain_way = ways[0]
    for way in ways:
        slowdown = statistics.median(own / other for own, other in zip(way.seconds, plain_way.seconds, strict=True)) - 1
        activations = (way.peak_bytes - way.lasting_bytes) / (plain_way.peak_bytes - plain_way.lasting_bytes)
        yield {
            "batch": setting.batch_size,
            "hidden": setting.hidden,
            "checkpointing": way.name,
            "peak MiB": f"{way.peak_bytes / 2**20:.1f}",
            "less": f"{1 - way.peak_bytes / plain_way.peak_bytes:.0%}",
            "less activations": f"{1 - activations:.0%}",
            "ms a batch": f"{1000 * statistics.mean(way.seconds):.0f}",
            "slowdown": f"{slowdown:+.0%}",
            "same losses": "yes" if way.losses == plain_way.losses else "no",
        }


def table(rows):
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles), *([str(row[title]) for title in titles] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(rows, path):
    """Peak and time of every row, as bars."""
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'memfit[plots]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"batch {row['batch']}, hidden {row['hidden']}: {row['checkpointing']}" for row in rows]
    figure, axes = pyplot.subplots(1, 2, sharey=True, figsize=(11, 1 + 0.28 * len(rows)), layout="constrained")
    colours = {"none": "tab:grey", "memfit": "tab:green"}
    bars = [colours.get(row["checkpointing"], "tab:blue") for row in rows]
    for axis, title in zip(axes, ("peak MiB", "ms a batch"), strict=True):
        axis.barh(labels, [float(row[title]) for row in rows], color=bars)
        axis.set_xlabel(title)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"plot: {path}")


def settings_of(options):
    if not options.full:
        return [Setting(size, hidden, segment, options.selected) for size, hidden, segment in options.only]
    wide = [Setting(size, hidden, 4, False) for size in (64, 256) for hidden in (256, 512, 1024)]
    deep = [Setting(64, 256, segment, segment == 1) for segment in (1, 2, 6)]
    return wide + deep


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a Penn Treebank text: a folder with ptb.train.txt, or a file")
    parser.add_argument("--full", action="store_true", help="the whole table instead of one setting")
    parser.add_argument(
        "--only",
        nargs=3,
        type=int,
        action="append",
        metavar=("BATCH", "HIDDEN", "SEGMENT"),
        help="a setting; may be given several times (default: 64 256 4)",
    )
    parser.add_argument(
        "--selected",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --only: also the ways that compute one kind of layer again",
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, default=3, help="training runs, each from other weights")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=1, help="batches an epoch; -1 for all")
    parser.add_argument("--output", type=Path, default=Path("transformer-ptb"), help="folder for table and plots")
    options = parser.parse_args()
    options.only = options.only or [(64, 256, 4)]
    numbers = numbered(penn_treebank(options.data) if options.data else generated_text())
    options.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for setting in settings_of(options):
        rows += rows_of(setting, measured_ways(setting, numbers, options))
        (options.output / "table.md").write_text(table(rows) + "\n")  # what is there is not lost to an interrupt
    print()
    print(table(rows))
    plot(rows, options.output / "peak-and-time.png")


if __name__ == "__main__":
    main()
