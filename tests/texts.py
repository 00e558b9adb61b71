"""Generated text and tiny language models for tests of training tools."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

VOCABULARY = 64


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Sentences that can be learned: every word follows from the one before."""

    def __init__(self, count: int = 32, shortest: int = 24, longest: int = 24) -> None:
        self.count, self.shortest, self.longest = count, shortest, longest

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        own = torch.Generator().manual_seed(number)
        length = int(torch.randint(self.shortest, self.longest + 1, (1,), generator=own))
        start = int(torch.randint(1, VOCABULARY, (1,), generator=own))
        words = (start + 7 * torch.arange(length)) % (VOCABULARY - 1) + 1
        return {"input_ids": words}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest sentence."""
    rows = [sample["input_ids"] for sample in samples]
    words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def gpt2(dropout: float = 0.1, layers: int = 2, width: int = 32, positions: int = 64) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=positions,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
