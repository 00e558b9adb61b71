"""Train a small language model with the Trainer of transformers, with one line more, inside half of its activations.

python examples/trainer.py
"""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from torch.utils.data import Dataset

from memfit.cli.torchvision_repair import prepare

prepare()  # torchvision beside a CPU build of torch

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import memfit
from memfit.units import format_bytes

vocabulary = 200


class Sentences(Dataset):
    """Generated sentences of 16 to 96 words; each word follows from the one before."""

    def __len__(self):
        return 256

    def __getitem__(self, number):
        own = torch.Generator().manual_seed(number)
        length, start = (
            int(torch.randint(low, high, (1,), generator=own)) for low, high in ((16, 97), (1, vocabulary))
        )
        return {"input_ids": (start + 7 * torch.arange(length)) % (vocabulary - 1) + 1}


def collate(samples):  # what DataCollatorForLanguageModeling does with a tokenizer
    rows = [sample["input_ids"] for sample in samples]
    words = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def make_trainer(folder):
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=vocabulary, n_positions=128, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,  # padding to buckets would draw other masks
        loss_type="ForCausalLM",
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=8,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Sentences()
    return Trainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=data, eval_dataset=data, data_collator=collate
    )


with tempfile.TemporaryDirectory() as folder:
    plain = make_trainer(folder)
    plain.train()

    trainer = make_trainer(folder)
    trainer = memfit.integrations.transformers.fit(trainer, budget=0.7, measure_every=1)  # the one line
    trainer.train()

losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (plain, trainer)]
peaks = [entry["memfit/peak_bytes"] for entry in trainer.state.log_history if "memfit/peak_bytes" in entry]
budget = memfit.plan_of(trainer.model).budget_bytes
difference = max(abs(one - other) for one, other in zip(*losses, strict=True))
print(memfit.plan_of(trainer.model))
print(memfit.captures_of(trainer.model))
print(f"largest difference between losses: {difference:.1e} (batches are padded further, which rounds differently)")
print(f"highest measured peak {format_bytes(max(peaks))}, budget {format_bytes(budget)}")
if difference > 1e-3 or max(peaks) > budget:
    raise SystemExit("the fitted run differs, or is over its budget")
