"""Measure a small GPT in a training loop without any framework: python examples/plain_loop.py

The task: continue a repeated random pattern, which a transformer solves by copying what followed last time. The script downloads
nothing, takes a minute or two on two CPU cores and writes results/plain_loop/report.html.
"""

import argparse
import shutil

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tracker import Watch
from tracker.report import write_report

RESULTS, STEPS = "results/plain_loop", 200


def batch(samples: int, seed: int) -> torch.Tensor:
    pattern = torch.randint(64, (samples, 12), generator=torch.Generator().manual_seed(seed))
    return pattern.repeat(1, 3)


def main() -> None:
    torch.manual_seed(0)
    shutil.rmtree(RESULTS, ignore_errors=True)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = {}
    with Watch(every_n_steps=50, probe=batch(8, seed=STEPS), k=10, save_dir=RESULTS, log_to=show) as watch:
        for step in range(STEPS):
            watch(step, model)  # `step` optimizer steps have been taken
            ids = batch(32, seed=step)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.item()
        watch(STEPS, model, force=True)
    print(f"loss {losses[0]:.2f} at first, {losses[STEPS - 1]:.2f} at last")
    print(write_report(RESULTS, f"{RESULTS}/report.html"))


def show(metrics: dict[str, float], step: int) -> None:
    """Print the headline; a run of W&B takes the same arguments: `wandb.log(metrics, step=step)`."""
    if "coupling/mean_offdiag" in metrics:
        measured, null = metrics["coupling/mean_offdiag"], metrics["coupling/mean_offdiag_null"]
        print(f"step {step}: mean mis-coupling of two blocks {measured:.3f}; null level {null:.3f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
