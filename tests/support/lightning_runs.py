"""Small training runs of Lightning, and modules, for the tests of the callback."""

import random

import lightning
import numpy as np
import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from torch import nn
from torch.utils.data import DataLoader, Dataset

from checkpoints import nano
from tests.support.draws import seeded


class Noisy(Dataset):
    """Sequences with new noise at each access, from the random states of torch, NumPy and Python."""

    def __init__(self, n: int = 64, length: int = 6, width: int = 8, noise: float = 1.0):
        generator = seeded(0)
        self.x = torch.randn(n, length, width, generator=generator)
        self.y = torch.randint(3, (n,), generator=generator)
        self.noise = noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = torch.randn(self.x.shape[1:]) * self.noise * np.random.rand() * random.random()
        return self.x[i] + noise, self.y[i]


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout and stochastic depth."""

    def __init__(self, width: int, drop: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=drop, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * width, width)
        )
        self.drop = drop

    def keep(self, x):
        return x * (torch.rand(len(x), 1, 1, device=x.device) > self.drop) if self.training else x

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.keep(self.attention(y, y, y, need_weights=False)[0])
        return x + self.keep(self.mlp(self.norm2(x)))


class Classifier(lightning.LightningModule):
    """A transformer on sequences, with no code for block coupling."""

    def __init__(
        self, width: int = 16, depth: int = 3, drop: float = 0.1, checkpointing: bool = False
    ):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.stages = nn.ModuleList(Block(width, drop) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        self.checkpointing = checkpointing
        self.losses = []

    def forward(self, x):
        x = self.embed(x)
        for block in self.stages:
            if self.checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class TwoOptimizers(Classifier):
    """Manual optimization with two optimizer steps per batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.stages.parameters(), 1e-2),
            torch.optim.SGD([*self.embed.parameters(), *self.head.parameters()], 1e-2),
        ]


class Sharded(Classifier):
    """A module whose blocks' weights are sharded over the ranks (FSDP2)."""

    def configure_model(self):
        from torch.distributed.fsdp import fully_shard

        for block in self.stages:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class PretendAccelerator(Accelerator):
    """Lightning's interface to the pretend device: `trainer(**ON_PRETEND_DEVICE)`, in tests with the `pretend` fixture."""

    def setup_device(self, device):
        assert device.type == "pretend", device

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("pretend", index) for index in range(devices)]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return hasattr(torch, "pretend")

    @staticmethod
    def name():
        return "pretend"


# Pytest imports this module twice
AcceleratorRegistry.register("pretend", PretendAccelerator, override=True)
# Lightning places an accelerator that it does not know on the CPU, so the strategy names the device.
StrategyRegistry.register("pretend", SingleDeviceStrategy, device="pretend:0", override=True)
ON_PRETEND_DEVICE = {"accelerator": "pretend", "strategy": "pretend", "devices": 1}


def trainer(callbacks=(), max_steps: int = 8, keep=None, **options) -> lightning.Trainer:
    """Return a trainer on the CPU without output; `keep` is where it keeps a checkpoint of each step."""
    quiet = {
        "logger": False,
        "enable_checkpointing": keep is not None,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if keep is not None:
        of_each_step = ModelCheckpoint(keep, "{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [*callbacks, of_each_step]
    return lightning.Trainer(
        callbacks=list(callbacks), max_steps=max_steps, **{"accelerator": "cpu", **quiet, **options}
    )


def fit(
    trainer,
    make=Classifier,
    workers: int = 0,
    validate: bool = True,
    data=None,
    batch: int = 8,
    shuffle=True,
    **options,
):
    """Make and train a module from a fixed seed; return it."""
    lightning.seed_everything(0, workers=True, verbose=False)
    module = make()
    data = data or Noisy()
    training = DataLoader(
        data, batch, shuffle=shuffle, num_workers=workers, persistent_workers=workers > 0
    )
    trainer.fit(module, training, DataLoader(data, 8) if validate else None, **options)
    return module


class Toy(lightning.LightningModule):
    """A user's LightningModule that contains a language model."""

    def __init__(self, width: int):
        super().__init__()
        self.save_hyperparameters()
        self.model = nano.build(nano.NanoRecipe(layers=2, width=width, vocabulary=320, context=64))

    def forward(self, input_ids, attention_mask=None):
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).logits


class EncoderModule(lightning.LightningModule):
    """A module around an encoder, for different types of batches and forwards."""

    def __init__(self):
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch, index):
        return self.model(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)
