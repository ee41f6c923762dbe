"""Train a plain nn.TransformerEncoder and measure the coupling of its blocks: python examples/transformer_encoder.py

The task: which of eight symbols occurs most often in a sequence of 32? The script downloads nothing, takes a few
minutes at most on two CPU cores and writes results/transformer_encoder/DATE/report.html.
"""

import argparse
import time

import lightning
import torch
from torch import nn

from tracker import CouplingCallback
from tracker.report import write_report

# Each run has a directory of its own
RESULTS = time.strftime("results/transformer_encoder/%Y-%m-%d-%H%M%S")


class MostFrequent(lightning.LightningModule):
    """A classifier without any code for the callback."""

    def __init__(self, symbols: int = 8, width: int = 64, depth: int = 6):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.encoder = nn.TransformerEncoder(
            layers[0], depth, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        # nn.TransformerEncoder copies its layer: blocks with identical weights would be coupled before any training.
        self.encoder.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, symbols)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))

    def training_step(self, batch, index):
        ids, answer = batch
        return nn.functional.cross_entropy(self(ids), answer)

    def validation_step(self, batch, index):
        ids, answer = batch
        self.log("accuracy", (self(ids).argmax(-1) == answer).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def data(n: int, seed: int) -> torch.utils.data.TensorDataset:
    ids = torch.randint(8, (n, 32), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(ids, nn.functional.one_hot(ids).sum(1).argmax(-1))


def main() -> None:
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_steps=256,
        # Defaults: the first validation batch, the last token, steps 0, 1, 2, 4, 8 and so on.
        callbacks=[CouplingCallback(k=10, save_dir=RESULTS)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        MostFrequent(),
        torch.utils.data.DataLoader(data(16_384, seed=0), 64, shuffle=True),
        torch.utils.data.DataLoader(data(1024, seed=1), 64),
    )
    print(write_report(RESULTS, f"{RESULTS}/report.html"))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
