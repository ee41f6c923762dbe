"""Train nano with a penalty on uncoupled blocks, and compare: python examples/coupling_penalty.py [--steps 150]

Three trainings from nano's untrained weights on Python's documentation, that differ in one thing, the weight
of `tracker.coupling_penalty` in the loss. The script downloads nothing; the first run trains nano, whose tokenizer and
initial weights it needs. It takes some minutes on two CPU cores, prints a table and writes results/coupling_penalty/DATE/.
"""

import argparse
import time
from pydoc_data.topics import topics

import lightning
import torch

import tracker
from checkpoints import nano

RESULTS = time.strftime("results/coupling_penalty/%Y-%m-%d-%H%M%S")  # each run has a directory of its own
LENGTH, BATCH = 64, 16
WEIGHTS = (0.0, 0.3, 3.0)
MEASURES = ("miscoupling", "miscoupling_release", "offdiag_normalized")


class Training(lightning.LightningModule):
    def __init__(self, model, weight: float):
        super().__init__()
        self.model, self.weight = model, weight

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        if self.weight:
            # A quarter of the sequences and two pairs of blocks: an estimate of the penalty needs few samples.
            loss = loss + self.weight * tracker.coupling_penalty(self.model, batch[: BATCH // 4], pairs=2)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(steps: int) -> None:
    tokenizer = nano.load(step=0)[1]
    ids = torch.tensor(tokenizer("\n".join(text for _, text in sorted(topics.items())))["input_ids"])
    sequences = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    sequences = sequences[torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))]
    held_out, training = sequences[:128], sequences[128:]
    table = ["weight   held-out loss" + "".join(f"{name:>22}" for name in MEASURES) + "     (null levels)"]
    for weight in WEIGHTS:
        lightning.seed_everything(0, verbose=False)
        model = nano.load(step=0)[0].train()
        watch = tracker.CouplingCallback(
            steps=[steps], probe=held_out[:8], k=10, save_dir=f"{RESULTS}/weight{weight:g}"
        )
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = lightning.Trainer(max_steps=steps, callbacks=[watch], **quiet)
        trainer.fit(Training(model, weight), torch.utils.data.DataLoader(training, BATCH, shuffle=True))
        with torch.no_grad():
            loss = float(model.eval()(input_ids=held_out, labels=held_out).loss)
        last = tracker.open_results(f"{RESULTS}/weight{weight:g}").isel(step=-1)
        apart = last.layer != last.layer_other
        nulls = {name: tracker.null_level(last, name).where(apart).mean() for name in MEASURES}
        measured = (f"{last[name].where(apart).mean():.3f} ({nulls[name]:.3f})" for name in MEASURES)
        table.append(f"{weight:6g}   {loss:13.3f}" + "".join(f"{value:>22}" for value in measured))
    print("\n".join(table))  # after the summaries of the trainings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps of each run")
    main(parser.parse_args().steps)
