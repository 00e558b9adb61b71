"""Put around models, and into them, what others do: norms of weights, adapters, compilers, memfit itself."""

import dataclasses
import types
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import memfit
from patterns.models import Net, Normed
from patterns.pattern import LEFT, Pattern, State, features, fit, fit_with_room, loss_of, usual_step


def with_parts(change: Any, make: Any = Net) -> Any:
    def made() -> nn.Module:
        model = make()
        change(model)
        return model

    return made


def replace_part(name: str, wrap: Any) -> Any:
    return with_parts(lambda model: setattr(model, name, wrap(getattr(model, name))))


class LowRank(nn.Module):
    """A frozen layer with a low-rank change beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.base(batch) + self.up(self.down(self.dropout(batch)))


def by_peft() -> nn.Module:
    import peft

    return peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["first", "second"], lora_dropout=0.1))


def scale_adapter(state: State, number: int) -> None:
    if number == 10:
        state.model.base_model.model.first.scaling["default"] = 0.25


def prune_at_ten(state: State, number: int) -> None:
    if number == 10:
        prune.l1_unstructured(state.model.first, "weight", amount=0.3)
        state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.01)


def cached_step(state: State, batch: torch.Tensor, number: int) -> float:
    with parametrize.cached():
        return usual_step(state, batch, number)


class Positive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.floor = 0.0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(weight) + self.floor


def raise_floor(state: State, number: int) -> None:
    state.model.second.parametrizations.weight[0].floor = number // 5 / 10


def forget_compiled(state: State) -> None:
    torch.compiler.reset()


def compile_it(state: State) -> None:
    state.compiled = torch.compile(state.model, backend="eager")


def fit_compiled(state: State, sample: torch.Tensor) -> None:
    fit(state.compiled, sample)


def compiled_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    loss = loss_of(state.compiled(batch), batch)
    loss.backward()
    state.optimizer.step()
    return loss.item()


def wrap_forward(state: State) -> None:
    own = state.model.forward
    state.model.forward = lambda batch: own(batch) * 2


def bind_forward(state: State, number: int) -> None:
    if number == 10:
        state.model.forward = types.MethodType(
            lambda model, batch: model.second(torch.relu(model.first(batch))), state.model
        )


def fit_part(state: State, sample: torch.Tensor) -> None:
    fit(state.model.first, sample)
    fit(state.model, sample)


def remove_and_fit(state: State, number: int) -> None:
    if not getattr(state, "is_fitted", False):
        return
    if number == 5:
        memfit.remove(state.model)
    if number == 10:
        fit(state.model, features(0))


def fit_and_note(state: State, sample: torch.Tensor) -> None:
    fit(state.model, sample)
    state.is_fitted = True


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    hidden: torch.Tensor | None = None


class ReturnsDataclass(Net):
    def forward(self, batch: torch.Tensor) -> Output:
        hidden = torch.tanh(self.first(batch))
        return Output(self.second(hidden), hidden)


class ReturnsDict(Net):
    def forward(self, batch: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.first(batch))
        return {"scores": self.second(hidden), "hidden": [hidden, None], "size": len(batch)}


def scores_step(state: State, batch: torch.Tensor, number: int) -> float:
    state.optimizer.zero_grad()
    output = state.model(batch)
    scores, hidden = (
        (output.scores, output.hidden) if isinstance(output, Output) else (output["scores"], output["hidden"][0])
    )
    loss = loss_of(scores, batch) + hidden.square().mean()
    loss.backward()
    state.optimizer.step()
    return loss.item()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor, hidden: Any = None) -> Any:
        output, hidden = self.lstm(batch.view(len(batch), 2, 8), hidden)
        return self.head(output[:, -1]), hidden


def carried_step(state: State, batch: torch.Tensor, number: int) -> float:
    """Truncated backpropagation: the hidden state of the last step goes on, detached."""
    state.optimizer.zero_grad()
    output, hidden = state.model(batch, getattr(state, "hidden", None))
    state.hidden = tuple(each.detach() for each in hidden)
    loss = loss_of(output, batch)
    loss.backward()
    state.optimizer.step()
    return loss.item()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(batch.view(len(batch), 2, 8)).mean(1))


def set_default_dtype(state: State, number: int) -> None:
    torch.set_default_dtype(torch.float64 if number >= 10 else torch.float32)


class MakesTensors(Net):
    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return (torch.sigmoid(hidden) * torch.linspace(0.1, 1, 32)).to(hidden.dtype)


PATTERNS = [
    Pattern(name="weight_norm, the old one", make=replace_part("first", nn.utils.weight_norm)),
    Pattern(name="weight_norm as a parametrization", make=replace_part("first", parametrizations.weight_norm)),
    Pattern(
        name="spectral_norm as a parametrization",
        make=replace_part("first", parametrizations.spectral_norm),
        slow=True,
    ),
    Pattern(name="spectral_norm, the old one", make=replace_part("first", nn.utils.spectral_norm)),
    Pattern(
        name="orthogonal weights",
        make=replace_part("first", parametrizations.orthogonal),
        slow=True,
    ),
    Pattern(
        name="a parametrization of one's own, with a number on it, changed",
        make=with_parts(lambda model: parametrize.register_parametrization(model.second, "weight", Positive())),
        change=raise_floor,
    ),
    Pattern(
        name="parametrize.cached() around the step",
        make=replace_part("first", parametrizations.weight_norm),
        step=cached_step,
    ),
    Pattern(
        name="pruning, before the fit",
        make=with_parts(lambda model: prune.l1_unstructured(model.first, "weight", amount=0.3)),
    ),
    Pattern(name="pruning, from the tenth step on", make=Net, change=prune_at_ten, fit=fit_with_room),
    Pattern(
        name="LoRA written by hand",
        make=replace_part("first", LowRank),
        slow=True,
    ),
    Pattern(
        name="LoRA by peft",
        make=by_peft,
        slow=True,
    ),
    Pattern(
        name="LoRA by peft, its scaling changed",
        make=by_peft,
        change=scale_adapter,
        slow=True,
    ),
    Pattern(
        name="a compiled submodule",
        make=replace_part("first", lambda part: torch.compile(part, backend="eager")),
        outcome=LEFT + "compiled by torch.compile",
        slow=True,
    ),
    Pattern(
        name="torch.compile around a fitted model",
        make=Net,
        start=compile_it,
        step=compiled_step,
        end=forget_compiled,
        slow=True,
    ),
    Pattern(
        name="a compiled model fitted",
        make=Net,
        before_fit=compile_it,
        fit=fit_compiled,
        step=compiled_step,
        end=forget_compiled,
        slow=True,
    ),
    Pattern(name="a scripted submodule (torch.jit)", make=replace_part("first", torch.jit.script)),
    Pattern(name="the forward of a fitted model wrapped", make=Net, start=wrap_forward),
    Pattern(name="the forward of a fitted model replaced", make=Net, change=bind_forward),
    Pattern(name="a part fitted, then the whole", make=Net, fit=fit_part),
    Pattern(name="the fit removed and made anew in between", make=Normed, fit=fit_and_note, change=remove_and_fit),
    Pattern(name="outputs in a dataclass", make=ReturnsDataclass, step=scores_step),
    Pattern(name="outputs in a dict with a list, None and a number", make=ReturnsDict, step=scores_step),
    Pattern(
        name="an LSTM whose hidden state goes on, detached",
        make=Recurrent,
        step=carried_step,
        fit=fit_with_room,
        beside=lambda state: state.hidden,
        slow=True,
    ),
    Pattern(
        name="a Transformer layer with dropout",
        make=Attends,
        slow=True,
    ),
    Pattern(
        name="torch.set_default_dtype from the tenth step on",
        make=MakesTensors,
        fit=fit_with_room,
        change=set_default_dtype,
        end=lambda state: torch.set_default_dtype(torch.float32),
    ),
]
