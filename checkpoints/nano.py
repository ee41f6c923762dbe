"""The embedded suite `nano`: a small GPT-NeoX with Pythia's architecture, trained locally, with log-spaced checkpoints.

The recipe was chosen because it shows the findings of the paper; docs/decisions.md has a table of those that were tried,
most of which do not. The training text is the source and documentation of the Python standard library: about two million tokens,
of which 256 steps use a quarter of a million. Initial weights are drawn as Pythia's were, and the rate rises and then falls as a
cosine, as Pythia's did. Unlike there, embeddings learn at a multiple of the rate without decay, and the matrices of the blocks
decay strongly. Checkpoints are written to a cache with the layout of the Hugging Face hub, so code that loads
`EleutherAI/pythia-70m` at `step128` can load `block-coupling/nano` at `step128` in the same way. Training is deterministic
for a given seed, Python version and number of threads, and takes about a minute of CPU time.
"""

import hashlib
import json
import logging
import math
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.configuration import Shape
from checkpoints.fetch import cached_snapshot
from checkpoints.hub import repo_dir
from checkpoints.load import load as load_checkpoint
from checkpoints.load import without_progress_bars
from tracker.common.errors import CheckpointError
from tracker.common.files import Lock, cache_root, write_atomic

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from transformers import GPTNeoXForCausalLM, PreTrainedTokenizerFast

REPO = "block-coupling/nano"
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
HELD_OUT = "held-out loss (nats per token)"


@dataclass(frozen=True)
class NanoRecipe:
    """The settings that determine the suite's weights, together with the text and the seed."""

    characters: int = 6_000_000  # length of the text
    layers: int = 6
    width: int = 128
    heads: int = 4
    vocabulary: int = 2048
    context: int = 256
    batch: int = 8
    length: int = 128
    rate: float = 2e-3  # the largest
    warm_up: int = 32
    last_rate: float = 0.1  # at the last step, as a share of the largest
    embedding_rate: float = 20.0  # that of the embeddings, as a multiple
    weight_decay: float = 3.0  # of the matrices of the blocks
    clip: float = 1.0
    steps: tuple[int, ...] = STEPS

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimiser step."""
        return self.batch * self.length

    def arranged(self, ids: "Tensor", generator: "Generator") -> "Tensor":
        """Return the tokens of the text, (tokens,), in the order in which they are trained on."""
        return ids

    def rate_at(self, t: int) -> float:
        """Return the learning rate of step t + 1, as a share of the largest: a linear rise, then a cosine."""
        if t < self.warm_up:
            return (t + 1) / self.warm_up
        after = (t - self.warm_up) / max(1, max(self.steps) - self.warm_up)
        return self.last_rate + (1 - self.last_rate) * (1 + math.cos(math.pi * after)) / 2


def cache_dir(seed: int = 0, recipe: NanoRecipe | None = None) -> Path:
    """Return the directory of the suite for this seed, recipe and Python version, below `files.cache_root()`."""
    recipe = recipe or NanoRecipe()
    identity = json.dumps([asdict(recipe), sys.version_info[:3]], sort_keys=True)
    name = f"nano-seed{seed}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return cache_root() / name


def is_trained(seed: int = 0, recipe: NanoRecipe | None = None) -> bool:
    """Whether all checkpoints of the suite exist. A reference is written after the snapshot that it points to."""
    recipe = recipe or NanoRecipe()
    references = repo_dir(REPO, cache_dir(seed, recipe)) / "refs"
    return all((references / f"step{step}").exists() for step in recipe.steps)


def train(seed: int = 0, recipe: NanoRecipe | None = None, callbacks: Sequence[Any] = ()) -> Path:
    """Train the suite, with optional Lightning callbacks; print a line per checkpoint and return the cache directory.

    An interrupted training leaves complete checkpoints only; the next call trains again from scratch and reproduces them
    exactly. Of two concurrent calls, one trains and the other waits.
    """
    recipe = recipe or NanoRecipe()
    directory = cache_dir(seed, recipe)
    directory.mkdir(parents=True, exist_ok=True)
    with Lock.wait(directory / ".training"):
        if not is_trained(seed, recipe):
            _train(seed, recipe, directory, callbacks)
    return directory


def load(
    step: int | None = None, seed: int = 0, recipe: NanoRecipe | None = None
) -> "tuple[GPTNeoXForCausalLM, PreTrainedTokenizerFast]":
    """Return the model and the tokenizer at a step of the suite, by default the last; train it first if no process has done so.

    Raises:
        CheckpointError: if the suite has no checkpoint at this step.
    """
    steps = (recipe or NanoRecipe()).steps
    step = steps[-1] if step is None else step
    if step not in steps:
        raise CheckpointError(f"nano has no step {step}; choose from {', '.join(map(str, steps))}")
    loaded: Any = load_checkpoint(cached_snapshot(REPO, f"step{step}", train(seed, recipe)))
    return loaded


def _train(seed: int, recipe: NanoRecipe, directory: Path, callbacks: Sequence[Any]) -> None:
    import lightning
    import torch

    started = time.perf_counter()
    training, held_out = _texts(recipe.characters)
    tokenizer = _tokenizer(training, recipe)
    ids, held_out_ids = (
        torch.tensor(list(chain.from_iterable(tokenizer(part)["input_ids"])))
        for part in (training, held_out)
    )
    print(
        f"nano: {len(ids):,} tokens of the Python standard library to train on, {len(held_out_ids):,} held out "
        f"({time.perf_counter() - started:.0f} s); writing to {directory}",
        flush=True,
    )
    with quiet_lightning():
        lightning.seed_everything(seed, verbose=False)
        module = _module(recipe, tokenizer, held_out_ids, directory)
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(
            len(ids) - recipe.length, (max(recipe.steps) * recipe.batch,), generator=generator
        )
        ids = recipe.arranged(ids, generator)
        sequences = torch.stack([ids[start : start + recipe.length] for start in starts])
        trainer = lightning.Trainer(
            max_steps=max(recipe.steps),
            callbacks=list(callbacks),
            accelerator="cpu",  # the same weights on every machine, with a GPU or without
            gradient_clip_val=recipe.clip,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(module, torch.utils.data.DataLoader(sequences, batch_size=recipe.batch))  # type: ignore[arg-type]
        except SystemExit as stopped:  # raised by Lightning on Ctrl-C
            raise KeyboardInterrupt from stopped


def build(recipe: NanoRecipe) -> "GPTNeoXForCausalLM":
    """Build the untrained model: transformers' GPT-NeoX with Pythia's configuration and initialisation.

    The initialisation is `small_init` and `wang_init` of the library GPT-NeoX: weights are normal with variance 2 / (5 d), those
    that write to the residual stream with standard deviation 2 / (L sqrt(d)). transformers would take 0.02 for all.
    """
    from torch import nn
    from transformers import GPTNeoXForCausalLM

    shape = Shape(recipe.layers, recipe.width, recipe.heads, recipe.vocabulary, recipe.context)
    model = GPTNeoXForCausalLM(shape.config())
    d, L = recipe.width, recipe.layers
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            writes = name.endswith(("attention.dense.weight", "mlp.dense_4h_to_h.weight"))
            nn.init.normal_(
                weight, std=2 / (L * math.sqrt(d)) if writes else math.sqrt(2 / (5 * d))
            )
    return model


def _texts(limit: int) -> tuple[list[str], list[str]]:
    """Return the training texts and the held-out texts (every 20th), in a fixed order, up to `limit` characters."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data"}
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not skipped & set(path.relative_to(root).parts)
    ]
    texts = [text for _, text in sorted(topics.items())] + [
        path.read_text(errors="replace") for path in files
    ]
    # A stride through the sorted list mixes documentation and packages for every limit.
    texts = [texts[i] for offset in range(7) for i in range(offset, len(texts), 7)]
    kept, total = [], 0
    for text in texts:
        if total >= limit:
            break
        kept.append(text + "\n")
        total += len(text)
    return [t for i, t in enumerate(kept) if i % 20], [t for i, t in enumerate(kept) if not i % 20]


def _tokenizer(texts: list[str], recipe: NanoRecipe) -> "PreTrainedTokenizerFast":
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts[::4],
        vocab_size=recipe.vocabulary,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")


def _module(recipe: NanoRecipe, tokenizer: "PreTrainedTokenizerFast", held_out, directory: Path):
    """Build the LightningModule that trains the model and saves its checkpoints."""
    import lightning
    import torch

    held_out = held_out[: len(held_out) // recipe.length * recipe.length].view(-1, recipe.length)[
        :64
    ]

    class Nano(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = build(recipe)
            self.started = time.perf_counter()

        def training_step(self, batch, batch_index):
            return self.model(input_ids=batch, labels=batch, use_cache=False).loss

        def configure_optimizers(self):
            embeddings, blocks, others = [], [], []
            for name, weight in self.model.named_parameters():
                is_matrix_of_block = ".layers." in name and weight.dim() == 2
                (
                    blocks if is_matrix_of_block else embeddings if ".embed_in." in name else others
                ).append(weight)
            groups = [
                {
                    "params": embeddings,
                    "lr": recipe.rate * recipe.embedding_rate,
                    "weight_decay": 0.0,
                },
                {"params": blocks, "weight_decay": recipe.weight_decay},
                {"params": others, "weight_decay": 0.1},
            ]
            optimizer = torch.optim.AdamW(groups, recipe.rate, betas=(0.9, 0.95), fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_at)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

        def on_train_start(self):
            self.save(0)

        def on_train_batch_end(self, *_):
            if self.trainer.global_step in recipe.steps:
                self.save(self.trainer.global_step)

        @torch.no_grad()
        def save(self, step: int):
            self.model.eval()
            losses = [
                self.model(input_ids=part, labels=part, use_cache=False).loss
                for part in held_out.split(16)
            ]
            self.model.train()
            loss = float(torch.stack(losses).mean())
            commit = _save(self.model, tokenizer, step, {HELD_OUT: loss}, directory)
            seconds = time.perf_counter() - self.started
            print(
                f"nano: step {step:4d}  held-out loss {loss:.3f}  {seconds:4.0f} s  {commit[:8]}",
                flush=True,
            )

    return Nano()


def _save(model, tokenizer, step: int, scores: dict[str, float], directory: Path) -> str:
    """Write a revision (the snapshot, named by a hash of its content, then the reference to it) and return the hash."""
    repository = repo_dir(REPO, directory)
    unfinished = repository / "snapshots" / f".step{step}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / "scores.json").write_text(json.dumps(scores))
    digest = hashlib.sha1(usedforsecurity=False)
    for path in sorted(unfinished.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    commit = digest.hexdigest()
    snapshot = repository / "snapshots" / commit
    if snapshot.exists():
        shutil.rmtree(unfinished)
    else:
        unfinished.rename(snapshot)
    reference = repository / "refs" / f"step{step}"
    write_atomic(reference, commit.encode())
    return commit


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's notices about GPUs, workers and tips."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), without_progress_bars():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
