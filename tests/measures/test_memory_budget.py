"""The peak of memory of a measurement in a process of its own, against its `memory_budget`."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

BUDGET = 108 << 20
OPTIONS = {"k": 4, "final_norm": "exclude"}
CASES = {  # with more bytes of Jacobians than the budget
    "wide": {"width": 768, "blocks": 2, "prompts": 25, "n": 16},
    "narrow": {"width": 96, "blocks": 8, "prompts": 9, "n": 48, "tokens": "all"},
    "in a file": {"width": 768, "blocks": 26, "prompts": 2, "n": 16},
    "across tokens": {"width": 192, "blocks": 3, "prompts": 14, "n": 24, "measures": "tokenwise"},
}


def peak_of_measurement(
    width: int, blocks: int, prompts: int, n: int, tokens: str = "last", measures: str = "coupling"
) -> tuple[list[str], int]:
    """Return the measured variables, and the largest number of bytes in use above those before the measurement."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    import tracker
    from benchmarks import machine

    def model(width: int, blocks: int) -> torch.nn.Module:
        config = GPTNeoXConfig(vocab_size=64, num_attention_heads=4, num_hidden_layers=blocks)
        config.update({"hidden_size": width, "intermediate_size": 4 * width})
        return GPTNeoXForCausalLM(config).eval()

    torch.set_num_threads(1)
    chosen = {**OPTIONS, "tokens": tokens, "measures": measures}
    tracker.measure(model(32, 2), torch.zeros(1, 4, dtype=torch.long), **chosen)  # loads libraries
    measured, inputs = model(width, blocks), torch.randint(64, (prompts, n))
    found = []

    def measure():
        found.append(tracker.measure(measured, inputs, memory_budget=BUDGET, **chosen))

    peak = machine.peak(measure)
    return list(found[0].data_vars), peak


@pytest.fixture(scope="module")
def process():
    with pytest.MonkeyPatch.context() as patch:
        # Freed arrays go back to the system at once: otherwise the C library keeps them for later ones.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 16))
        patch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 16))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            executor.submit(int).result()  # the process starts
            yield executor


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_more_memory_is_in_use(process, name):
    variables, peak = process.submit(peak_of_measurement, **CASES[name]).result()
    assert any("miscoupling" in variable for variable in variables)
    assert BUDGET / 4 < peak <= BUDGET
