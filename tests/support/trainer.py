"""transformers' Trainer of a small GPT-2 with dropout."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.support.draws import integers

STEPS = 6


def data(count: int = 24) -> list[dict[str, torch.Tensor]]:
    tokens = integers(0, 50, count, 10, seed=0)
    return [{"input_ids": row, "labels": row} for row in tokens]


class Recorder(Trainer):
    """Keeps the loss of each batch."""

    def training_step(self, *arguments, **options):
        loss = super().training_step(*arguments, **options)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


def make(directory, kind=Recorder, **options):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=16,
            n_layer=3,
            n_head=2,
            vocab_size=50,
            n_positions=16,
            resid_pdrop=0.2,
            attn_pdrop=0.1,
        )
    )
    usual = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 2,
    }
    usual |= {"save_strategy": "no", "disable_tqdm": True, "seed": 1}
    return kind(
        model,
        TrainingArguments(str(directory), **(usual | options)),
        train_dataset=data(),
        eval_dataset=data(8),
    )
