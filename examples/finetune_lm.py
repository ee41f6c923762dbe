"""Fine-tune a Hugging Face language model and measure its blocks: python examples/finetune_lm.py [MODEL] [TEXT.txt]

MODEL is a name or directory for AutoModelForCausalLM.from_pretrained. Without arguments the script trains a very small
model on Python's source code and fine-tunes it on Python's documentation, offline, in about a minute on two CPU cores.
It writes results/finetune_lm/DATE/report.html.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics

import lightning
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import nano
from checkpoints.fetch import cached_snapshot
from tracker import CouplingCallback
from tracker.report import write_report

# Each run has a directory of its own
RESULTS = time.strftime("results/finetune_lm/%Y-%m-%d-%H%M%S")
LENGTH = 64
PROMPTS = [
    "The following statement assigns",
    "If an exception is raised, the interpreter",
    "import os\n\ndef main(",
]


class FineTuning(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def small_model() -> Path:
    """Train a GPT-NeoX of four blocks for some seconds; return its directory."""
    recipe = nano.NanoRecipe(
        characters=400_000,
        layers=4,
        width=64,
        vocabulary=512,
        context=128,
        length=64,
        steps=(0, 64),
    )
    cache = nano.train(recipe=recipe)
    return cached_snapshot(nano.REPO, "step64", cache)


def main(source: str | None = None, text: str | None = None) -> None:
    directory = source or small_model()
    lightning.seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    words = (
        Path(text).read_text() if text else "\n".join(body for _, body in sorted(topics.items()))
    )
    ids = torch.tensor(tokenizer(words[:500_000])["input_ids"])
    sequences = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    watch = CouplingCallback(
        every_n_steps=20, probe=PROMPTS, tokenizer=tokenizer, k=10, save_dir=RESULTS
    )
    trainer = lightning.Trainer(
        max_steps=100, callbacks=[watch], logger=False, enable_checkpointing=False
    )
    loader = torch.utils.data.DataLoader(sequences, 16, shuffle=True)
    trainer.fit(FineTuning(AutoModelForCausalLM.from_pretrained(directory).train()), loader)
    print(write_report(RESULTS, f"{RESULTS}/report.html"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("text", nargs="?", metavar="TEXT.txt")
    given = parser.parse_args()
    main(given.model, given.text)
