"""Measure a small GPT-2 in a training loop without any framework: python examples/plain_loop.py [--random]

The task: continue a random walk over 64 symbols, each of which has two possible followers. The script downloads nothing, takes
about half a minute on two CPU cores, prints how the blocks become coupled and the trajectories straighter, and writes
results/plain_loop/DATE/report.html.

With --random the symbols are random and there is nothing to learn: a control, which couples too (docs/limits.md).
"""

import argparse
import time

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from tracker import Watch
from tracker.report import write_report

RESULTS = time.strftime("results/plain_loop/%Y-%m-%d-%H%M%S")  # each run has a directory of its own
STEPS, SYMBOLS, LENGTH = 64, 64, 36
FOLLOWERS = torch.randint(SYMBOLS, (SYMBOLS, 2), generator=torch.Generator().manual_seed(0))


def batch(samples: int, seed: int, random: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if random:
        return torch.randint(SYMBOLS, (samples, LENGTH), generator=generator)
    walk = [torch.randint(SYMBOLS, (samples,), generator=generator)]
    for _ in range(LENGTH - 1):
        walk.append(FOLLOWERS[walk[-1], torch.randint(2, (samples,), generator=generator)])
    return torch.stack(walk, 1)


def main(random: bool) -> None:
    torch.manual_seed(0)
    # Untrained weights of 0.02, as in GPT-2, are small beside what training adds; blocks with larger ones couple less.
    config = GPT2Config(
        vocab_size=SYMBOLS,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=6,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = {}
    # In so short a training, measuring takes more than the 5 % of the time beyond which a warning is given.
    with Watch(
        every_n_steps=16,
        probe=batch(8, STEPS, random),
        k=10,
        save_dir=RESULTS,
        log_to=show,
        max_overhead=0.5,
    ) as watch:
        for step in range(STEPS):
            watch(step, model)  # `step` optimizer steps have been taken
            ids = batch(32, step, random)
            loss = cross_entropy(
                model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
        watch(STEPS, model, force=True)
    least = "ln 64 = 4.16" if random else "ln 2 = 0.69"
    print(
        f"loss {losses[0]:.2f} at first, {losses[STEPS - 1]:.2f} at last; no model can have less than {least}"
    )
    print(write_report(RESULTS, f"{RESULTS}/report.html"))


def show(metrics: dict[str, float], step: int) -> None:
    """Print the headline; a run of W&B takes the same arguments: `wandb.log(metrics, step=step)`."""
    if "miscoupling/mean_offdiag" in metrics:
        measured = metrics["miscoupling/mean_offdiag"]
        null = metrics["miscoupling/mean_offdiag_null"]
        straight, growth = (
            metrics[f"trajectory/{name}/median"] for name in ("lss", "expodistance")
        )
        print(
            f"step {step:2d}: mean mis-coupling of two blocks {measured:.3f} (null level {null:.3f}), "
            f"line-shape score {straight:.2f}, expodistance {growth:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random", action="store_true", help="train on random symbols")
    main(parser.parse_args().random)
