"""Waits of the host, launches and copies of a measurement do not grow with the samples, and with the blocks little."""

import timm
import torch

import tracker
from tests.pretend_device import Counts
from tests.support.models import Letters, Size, neox

SIZE = Size(width=64, depth=4, tokens=56)


def deit(blocks: int) -> torch.nn.Module:
    """Return a DeiT-Ti with 37 tokens."""
    return timm.create_model(
        "deit_tiny_patch16_224", img_size=96, num_classes=10, depth=blocks
    ).eval()


def costs(pretend, model: torch.nn.Module, inputs, **options) -> Counts:
    options = {
        "k": 5,
        "measures": ("coupling", "trajectory"),
        "svd": "full",
        "witness": "off",
    } | options
    model = model.to(pretend.device)
    with pretend.count() as counts:
        tracker.measure(model, inputs, **options)
    return counts


def images(number: int) -> torch.Tensor:
    return torch.randn(number, 3, 96, 96)


PROMPTS = ["a" * n for n in (5, 7, 9, 11, 13, 15, 17, 19)]


def totals(counts: Counts) -> tuple[int, ...]:
    return counts.launches, counts.syncs, counts.to_device, counts.to_host


def test_images_cost_no_launch_wait_or_copy_each(pretend):
    few, many = (costs(pretend, deit(2), images(B)) for B in (4, 8))
    assert totals(few) == totals(many)
    # One wait is for the first numbers of all blocks, by which equal blocks are told, and four are for null levels: the frames,
    # their columns, the products of singular vectors and their root. The answers of the model's copy are among them. A norm by
    # rows is two launches.
    assert few.syncs <= 60 and few.launches <= 1850


def test_a_block_waits_a_few_times(pretend):
    two, three = (costs(pretend, deit(blocks), images(8)) for blocks in (2, 3))
    assert three.syncs - two.syncs <= 6
    assert three.to_device - two.to_device <= 11
    assert three.launches - two.launches <= 570


WIDE = {"k": 10, "final_norm": "exclude"}
PROMPT = torch.arange(128)[None] % 50


def wide(blocks: int) -> torch.nn.Module:
    """Return blocks as wide as those of Pythia-70m."""
    return neox(size=Size(width=512, depth=blocks, tokens=128)).eval()


def test_a_wide_block_waits_a_few_times(pretend):
    """Singular vectors wait once for each basis of all blocks, their checks not at all."""
    two, three = (
        costs(pretend, wide(blocks), PROMPT, svd="krylov", witness="model", **WIDE)
        for blocks in (3, 4)
    )
    assert three.syncs - two.syncs <= 10
    assert three.launches - two.launches <= 640


def test_tokens_of_a_prompt_cost_no_launch_wait_or_copy_each(pretend):
    few, many = (
        costs(pretend, neox(size=SIZE).eval(), torch.randint(0, 50, (1, n)), tokens="all")
        for n in (10, 20)
    )
    assert totals(few) == totals(many)
    # One wait is for the first numbers of all blocks, two for modules outside the blocks that take and return a state.
    # The answers of the model's copy are among them.
    assert few.syncs <= 53


def test_a_prompt_waits_a_few_times(pretend):
    """Each prompt has its own forward pass, in which two values are read for each block; the Jacobians are formed together.

    Of the launches, 150 are its attention at the two ends of the difference that each block's rows are compared with. The passes
    of the model's copy are among them.
    """
    few, many = (
        costs(pretend, neox(size=SIZE).eval(), PROMPTS[:number], tokenizer=Letters())
        for number in (4, 8)
    )
    assert (many.syncs - few.syncs) / 4 <= 20
    assert (many.to_host - few.to_host) / 4 <= 4
    assert (many.launches - few.launches) / 4 <= 1590
