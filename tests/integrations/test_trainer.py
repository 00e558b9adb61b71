"""A transformers Trainer with one line more: the same losses inside the budget, and all its features."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.execute.attach import planned_forward
from memfit.integrations.trainer_data import search_s
from tests.texts import Texts, gpt2, llama, padded

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import Trainer, TrainerCallback, TrainingArguments

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:the forward of .* looks at values:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def make_trainer(
    folder: Path,
    model: Any = None,
    data: Any = None,
    kind: type[Trainer] = Trainer,
    collator: Any = padded,
    **options: Any,
) -> Trainer:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    } | options
    data = Texts() if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = TrainingArguments(**settings)
        return kind(
            model=gpt2() if model is None else model,
            args=args,
            train_dataset=data,
            eval_dataset=data,
            data_collator=collator,
        )


def fitted(trainer: Trainer, budget: Any = 0.8, **options: Any) -> Trainer:
    return memfit.integrations.transformers.fit(trainer, budget=budget, time_limit=1.0, **options)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def reported(trainer: Trainer) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for entry in trainer.state.log_history:
        numbers |= {name: value for name, value in entry.items() if name.startswith("memfit/")}
    return numbers


def test_losses_are_the_same_bit_for_bit_inside_the_budget(tmp_path: Path, capsys: Any) -> None:
    plain = make_trainer(tmp_path, eval_strategy="steps", eval_steps=2)
    plain.train()
    trainer = fitted(make_trainer(tmp_path, eval_strategy="steps", eval_steps=2))
    trainer.train()
    assert losses(trainer) == losses(plain)
    evaluations = [
        [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry] for each in (plain, trainer)
    ]
    assert evaluations[0] == evaluations[1]
    numbers = reported(trainer)
    assert 0 < numbers["memfit/peak_bytes"] <= numbers["memfit/budget_bytes"]
    assert numbers["memfit/peak_bytes"] == pytest.approx(numbers["memfit/predicted_peak_bytes"], rel=0.01)
    assert numbers["memfit/captures"] == 1
    assert numbers["memfit/hit_rate"] == 0.75
    assert "memfit/predicted_slowdown" in numbers
    state = trainer.model.state_dict()
    gpt2().load_state_dict(state)
    assert all(torch.equal(state[name], value) for name, value in plain.model.state_dict().items())


class Closing(TrainerCallback):
    """A logger that closes when training ends, as those of TensorBoard and wandb do."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.closed = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        assert not self.closed
        self.seen |= logs

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.closed = True


def test_a_logger_that_closes_at_the_end_has_seen_the_last_numbers(tmp_path: Path, capsys: Any) -> None:
    trainer = make_trainer(tmp_path)
    logger = Closing()
    trainer.add_callback(logger)
    fitted(trainer).train()
    assert logger.closed
    assert {"memfit/captures", "memfit/hit_rate", "memfit/peak_bytes"} <= logger.seen.keys()


@pytest.mark.slow
def test_texts_of_many_lengths_go_into_a_few_buckets(tmp_path: Path, capsys: Any) -> None:
    data = Texts(count=48, shortest=4, longest=40)
    lengths = [len(data[number]["input_ids"]) for number in range(48)]
    buckets = memfit.Buckets.of(lengths, most=3, batch_size=4, least_gain=0)
    plain = make_trainer(tmp_path, gpt2(dropout=0.0), data, max_steps=12)
    plain.train()
    trainer = fitted(make_trainer(tmp_path, gpt2(dropout=0.0), data, max_steps=12), buckets=buckets, measure_every=1)
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-4)
    numbers = reported(trainer)
    assert 1 < numbers["memfit/captures"] <= 3
    peaks = [entry["memfit/peak_bytes"] for entry in trainer.state.log_history if "memfit/peak_bytes" in entry]
    assert len(peaks) == 11
    assert max(peaks) <= numbers["memfit/budget_bytes"]
    runner = planned_forward(trainer.model).compile_call
    assert runner.searches == 1, "shorter batches take the decisions of the longest"
    assert trainer.get_eval_dataloader().collate_fn is not trainer.get_train_dataloader().collate_fn


def test_precision_and_accumulation_are_part_of_the_plan(tmp_path: Path, capsys: Any) -> None:
    options = {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 3}
    plain = make_trainer(tmp_path, **options)
    plain.train()
    trainer = fitted(make_trainer(tmp_path, **options))
    trainer.train()
    assert losses(trainer) == losses(plain)
    numbers = reported(trainer)
    assert 0 < numbers["memfit/peak_bytes"] <= numbers["memfit/budget_bytes"]
    assert numbers["memfit/captures"] == 1


class OwnLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(Trainer, {"label_smoothing_factor": 0.1}, marks=pytest.mark.slow, id="smoothing"),
        pytest.param(OwnLoss, {}, id="own loss"),
    ],
)
def test_a_loss_outside_the_model_counts(tmp_path: Path, capsys: Any, kind: type[Trainer], options: Any) -> None:
    plain = make_trainer(tmp_path, kind=kind, max_steps=3, **options)
    plain.train()
    trainer = fitted(make_trainer(tmp_path, kind=kind, max_steps=3, **options), budget=0.85)
    trainer.train()
    assert losses(trainer) == losses(plain)
    numbers = reported(trainer)
    assert 0 < numbers["memfit/peak_bytes"] <= numbers["memfit/budget_bytes"]


def test_adapters_on_a_frozen_model_get_gradients_alone(tmp_path: Path, capsys: Any) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    plain = make_trainer(tmp_path, adapted(), max_steps=3)
    plain.train()
    trainer = fitted(make_trainer(tmp_path, adapted(), max_steps=3), budget=0.7)
    plan = memfit.plan_of(trainer.model)
    trainer.train()
    assert losses(trainer) == losses(plain)
    trained = sum(each.nbytes for each in trainer.model.parameters() if each.requires_grad)
    frozen = sum(each.nbytes for each in trainer.model.parameters() if not each.requires_grad)
    assert plan.optimizer_state_bytes < 3 * trained < frozen
    assert plan.persistent_bytes < frozen + 5 * trained + 64 * 1024, "no gradient of a frozen weight is counted"
    numbers = reported(trainer)
    assert 0 < numbers["memfit/peak_bytes"] <= numbers["memfit/budget_bytes"]
    trainer.model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in trainer.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("first", ["plain", "fitted"])
def test_a_checkpoint_goes_on_with_memfit_and_without(tmp_path: Path, capsys: Any, first: str) -> None:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    whole = make_trainer(tmp_path / "whole", max_steps=4, lr_scheduler_type="constant")
    whole.train()
    start = make_trainer(tmp_path / "half", **options)
    start = fitted(start) if first == "fitted" else start
    start.train()
    go_on = make_trainer(tmp_path / "half", **options | {"max_steps": 4})
    go_on = go_on if first == "fitted" else fitted(go_on)
    go_on.train(resume_from_checkpoint=True)
    assert losses(go_on)[2:] == losses(whole)[2:]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("torch_compile", True),
        ("gradient_checkpointing", True),
        ("neftune_noise_alpha", 5.0),
        ("auto_find_batch_size", True),
    ],
)
def test_options_that_cannot_be_kept_are_refused_by_name(tmp_path: Path, option: str, value: Any) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    setattr(trainer.args, option, value)
    with pytest.raises(memfit.InvalidInput, match=option):
        fitted(trainer)
    assert memfit.plan_of(trainer.model) is None


def test_data_that_cannot_be_planned_for_is_refused_by_name(tmp_path: Path) -> None:
    def uneven(samples: Any) -> Any:
        batch = padded(samples)
        if batch["input_ids"].shape[1] < 30:
            batch.pop("attention_mask")
        return batch

    data = Texts(shortest=4, longest=40)
    with pytest.raises(memfit.InvalidSample, match="attention_mask"):
        fitted(make_trainer(tmp_path, data=data, collator=uneven))
    trainer = make_trainer(tmp_path)
    trainer.train_dataset = None
    with pytest.raises(memfit.InvalidInput, match="train_dataset"):
        fitted(trainer)
    with pytest.raises(memfit.InvalidInput, match=r"transformers\.Trainer"):
        memfit.integrations.transformers.fit(gpt2(), budget=0.5)


def test_a_model_fitted_before_its_trainer_trains_the_same(tmp_path: Path, capsys: Any) -> None:
    plain = make_trainer(tmp_path, max_steps=2, bf16=True)
    plain.train()
    model = gpt2().train()
    sample = padded([Texts()[number] for number in range(4)]) | {"num_items_in_batch": torch.tensor(92)}
    with torch.autocast("cpu", torch.bfloat16):
        model = memfit.fit(model, sample, budget=0.8, time_limit=1.0)
    trainer = make_trainer(tmp_path, model, max_steps=2, bf16=True)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert memfit.captures_of(model).count == 1
    assert memfit.plan_of(model) is not None
    assert memfit.plan_of(memfit.remove(model)) is None
    assert model.training
    model(**sample).loss.backward()  # by its own forward, behind Accelerate's
    assert memfit.captures_of(model).calls == 0


def test_labels_of_any_name_are_padded_with_what_losses_ignore(tmp_path: Path) -> None:
    from memfit.integrations.trainer_data import pad_values

    values = pad_values(make_trainer(tmp_path, label_names=["tags"]))
    assert values["tags"] == values["labels"] == values["shift_labels"] == -100
    assert values["input_ids"] == 0


def test_a_collator_that_makes_the_tokens_captures_every_length_by_itself(tmp_path: Path, capsys: Any) -> None:
    class Sentences(Texts):
        """Read once or twice each, not thousands of times to learn that they have no length."""

        reads = 0

        def __getitem__(self, number: int) -> dict[str, Any]:
            Sentences.reads += 1
            return {"text": super().__getitem__(number)["input_ids"].tolist()}

    def tokenized(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return padded([{"input_ids": torch.tensor(sample["text"])} for sample in samples])

    data = Sentences(count=400, shortest=4, longest=40)
    trainer = fitted(
        make_trainer(tmp_path, gpt2(dropout=0.0), data, collator=tokenized, max_steps=1, remove_unused_columns=False)
    )
    assert Sentences.reads < 200
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"max_steps": 4}, 1.0),
        ({"max_steps": 300}, 3.0),
        ({"max_steps": 150, "gradient_accumulation_steps": 2}, 3.0),
        ({"max_steps": 10_000}, 6.0),
    ],
)
def test_a_search_takes_no_longer_than_the_training_is_worth(
    tmp_path: Path, options: dict[str, Any], seconds: float
) -> None:
    assert search_s(make_trainer(tmp_path, **options)) == pytest.approx(seconds)


def test_without_a_number_of_steps_the_epochs_tell_how_long_a_training_is(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=-1, num_train_epochs=100)
    steps = 100 * len(Texts()) / 4
    assert search_s(trainer) == pytest.approx(min(6.0, max(1.0, 0.01 * steps)))
