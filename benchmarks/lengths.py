"""Text of many lengths through the Trainer of transformers: how many captures, what they cost, and the peak.

python -m benchmarks.lengths [steps]       # 300 steps, lengths 16 to 512; some minutes
"""

import os
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import memfit
from memfit.cli.torchvision_repair import prepare
from memfit.units import format_bytes

_VOCABULARY = 1000
_SHORTEST, _LONGEST, _ROWS = 16, 512, 4
_MEASURE_EVERY = 5


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Generated words, as long as it comes."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        own = torch.Generator().manual_seed(number)
        length = int(torch.randint(_SHORTEST, _LONGEST + 1, (1,), generator=own))
        return {"input_ids": torch.randint(1, _VOCABULARY, (length,), generator=own)}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def make_trainer(folder: str, steps: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=256,
        n_head=4,
        vocab_size=_VOCABULARY,
        n_positions=_LONGEST,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=_ROWS,
        max_steps=steps,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Sentences(), data_collator=collate)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    prepare()
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder, steps)
        start = time.monotonic()
        trainer = memfit.integrations.transformers.fit(trainer, budget=0.6, measure_every=_MEASURE_EVERY)
        trainer.train()
        seconds = time.monotonic() - start
    captures = memfit.captures_of(trainer.model)
    peaks = [each["memfit/peak_bytes"] for each in trainer.state.log_history if "memfit/peak_bytes" in each]
    report = next(each for each in trainer.callback_handler.callbacks if type(each).__name__ == "ReportCallback")
    limit = report.fitted.budget_bytes
    print(report.buckets)
    print(captures)
    print(f"{steps} steps in {seconds:.0f} s with planning, captures {captures.seconds / seconds:.1%} of it")
    print(
        f"{len(peaks)} steps measured: {sum(peak > limit for peak in peaks)} over the budget of {format_bytes(limit)}, "
        f"highest {format_bytes(int(max(peaks)))}"
    )


if __name__ == "__main__":
    main()
