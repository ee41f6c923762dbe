"""The options of `benchmarks.coupling`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tracker.common.values import Method, Precision


@dataclass
class Benchmark:
    """Time a coupling measurement, the published algorithm and plain matrix products.

    Args:
        shape: a Pythia size, deit-ti (32 x 32 images of 65 tokens) or deit-ti-224 (224 x 224, 197 tokens); random weights.
        tokens: length of the prompts.
        k: number of top singular vectors.
        blocks: number of blocks, the first ones. Default: all, for which the published algorithm takes hours on large shapes.
        prompts: number of prompts or images in a call of tracker.measure; the published algorithm takes one.
        what: coupling compares with the published algorithm; scaling times tracker.measure over lengths and numbers of prompts.
        svd: the method of tracker.measure for singular vectors.
        beside: a second such method to time, in turn with it.
        precision: of the matrix products in the Jacobians of tracker.measure, and of the plain products they are compared with.
        weights: dtype of the model's weights; the published Pythias have float16, which the published algorithm cannot take.
        memory_budget: bytes in addition to the weights; half of them hold Jacobians. Default: that of tracker.measure.
        device: cpu, cuda, cuda:1 and so on.
        repeats: number of timed runs of each; medians are reported.
        chunk: number of cotangents per batch in the published algorithm.
        published: whether to run the published algorithm at all.
        memory: whether to measure the peak of memory, on the CPU in a fresh process for each algorithm.
        out: a JSON file for the result, written after every repeat.
    """

    shape: Literal["14m", "31m", "70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b", "deit-ti", "deit-ti-224"]
    tokens: int = 128
    k: int = 50
    blocks: int | None = None
    prompts: int = 1
    what: Literal["coupling", "scaling"] = "coupling"
    svd: Method = "auto"
    beside: Method | None = None
    precision: Precision = "float32"
    weights: Literal["float32", "float16", "bfloat16"] = "float32"
    memory_budget: int | None = None
    device: str = "cpu"
    repeats: int = 5
    chunk: int = 32
    published: bool = True
    memory: bool = True
    out: Path | None = None
