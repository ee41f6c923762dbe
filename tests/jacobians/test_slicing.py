"""What of a block's arguments and masks belongs to a row, written out row by row."""

import pytest
import torch

from tests.support.measured import recorded
from tests.support.models import build, tokens
from tracker.jacobians.slicing import (
    NotSliceable,
    Rows,
    concatenate_argument,
    mask_rows,
    slice_argument,
)
from tracker.model.recording import AttentionCall

B, n, H = 3, 5, 2
ROWS = Rows(torch.tensor([2, 0, 2, 1]), torch.tensor([4, 1, 3, 4]))
PLACES = [*zip(ROWS.sample.tolist(), ROWS.token.tolist(), strict=True)]
AT_ONE_TOKEN = Rows(torch.tensor([0, 2]), torch.tensor([3, 3]))


def numbers(*shape):
    """Return a tensor of different numbers."""
    return torch.arange(torch.Size(shape).numel()).view(shape) + 1.0


@pytest.fixture(scope="module")
def call():
    _, ((call, *_),) = recorded(build("gpt_neox")[0], [tokens(B, n)])
    return call


def test_rows_of_states():
    X, source = numbers(B, n, 7), [0, 1, 2, 0]
    rows = Rows(ROWS.sample, ROWS.token, torch.tensor(source))
    of_rows = torch.stack([X[b, t] for b, t in PLACES])
    of_sources = torch.stack([X[b, s] for (b, _), s in zip(PLACES, source, strict=True)])
    assert torch.equal(rows.select(X), of_rows) and torch.equal(rows.select_sources(X), of_sources)
    assert torch.equal(ROWS.select_sources(X), of_rows) and len(ROWS) == 4
    some = torch.tensor([3, 0])
    assert torch.equal(rows.subset(some).select_sources(X), of_sources[some])
    assert torch.equal(ROWS.subset(some).select_sources(X), of_rows[some])
    at = rows.on(X.device)
    later = at.subset(slice(1, 3))
    assert torch.equal(X[later.sample, later.live], of_sources[1:3])
    assert torch.equal(X[later.sample, later.token], of_rows[1:3])
    assert rows.on(X.device) is at  # copied once


def test_groups_hold_each_sample_once():
    samples = torch.tensor([1, 0, 1, 1, 2, 0])
    groups = [*Rows(samples, torch.arange(6)).disjoint_groups()]
    assert [index.tolist() for index, _ in groups] == [[0, 1, 4], [2, 5], [3]]
    for index, group in groups:
        assert torch.equal(group.token, index) and torch.equal(group.sample, samples[index])


@pytest.mark.parametrize("shape", [(B, n), (B, n, 2), (B, n, 2, 2), (1, n, 2), (2 * n, n)])
def test_what_is_given_by_token(call, shape):
    value = numbers(*shape)
    expected = torch.stack([value[b if len(value) > 1 else 0, t] for b, t in PLACES])[:, None]
    assert torch.equal(slice_argument("position_ids", value, call, ROWS), expected)
    for kind in (tuple, list):
        both = slice_argument("position_embeddings", kind([value, -value]), call, ROWS)
        assert type(both) is kind
        assert torch.equal(both[0], expected) and torch.equal(both[1], -expected)
    given = {"position_ids": value, "use_cache": False, "sizes": [1, 2]}
    nested = slice_argument("kwargs", given, call, ROWS)
    assert torch.equal(nested.pop("position_ids"), expected)
    assert nested == {"use_cache": False, "sizes": [1, 2]}


def test_what_is_given_by_token_for_all_samples(call):
    value = numbers(n)
    found = slice_argument("cache_position", value, call, AT_ONE_TOKEN)
    assert torch.equal(found, value[3:4])
    alone = slice_argument("cache_position", value, call, AT_ONE_TOKEN.subset(slice(1)))
    assert torch.equal(alone, found)
    with pytest.raises(NotSliceable, match="'cache_position'"):
        slice_argument("cache_position", value, call, ROWS)


MASKS = {  # by shape and name: the shape of what is left of it
    ((B, 1, n, n), "attention_mask"): (4, 1, 1, 1),
    ((1, H, n, n), "attn_mask"): (4, H, 1, 1),
    ((B, n), "src_key_padding_mask"): (4, 1),
    ((B, n), "attention_mask"): (4, 1),
    ((n, n), "src_key_padding_mask"): (4, 1),
    ((n, n), "src_mask"): (1, 1),
}


@pytest.mark.parametrize(("shape", "name"), MASKS)
def test_masks_of_single_rows_have_their_samples_and_length_one(call, shape, name):
    mask = numbers(*shape)
    found = slice_argument(name, mask, call, ROWS)
    assert found.shape == MASKS[shape, name]
    first = mask.flatten(1)[:, 0]  # masks of two axes; of four, that of the first head
    samples = [b if shape[0] > 1 else 0 for b, _ in PLACES]
    assert torch.equal(found.flatten(1)[:, 0], first[samples] if len(found) > 1 else first[:1])


UNKNOWN = {  # how they divide can't be told
    "of one row": ("position_ids", numbers(B)),
    "of another length": ("position_ids", numbers(B, n + 1)),
    "an unknown name": ("memory", numbers(B, n)),
    "a mask of three axes": ("attention_mask", numbers(B, n, n)),
    "a mask of another length": ("attention_mask", numbers(B, 1, n, n + 1)),
    "masks in a list": ("attention_mask", [numbers(B, 1, n, n)]),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_can_not_be_divided_is_named(call, what):
    name, value = UNKNOWN[what]
    with pytest.raises(NotSliceable, match=f"'{name}' divides into rows is not known"):
        slice_argument(name, value, call, ROWS)


def test_arguments_of_several_recordings():
    first, second, shared = numbers(2, 3), -numbers(1, 3), numbers(1, 3)
    parts = [
        (first, shared, {"a": [first]}, None, "x"),
        (second, shared.clone(), {"a": [second]}, None, "x"),
    ]
    together = torch.cat([first, second])
    joined, same, nested, none, text = concatenate_argument("a", parts, [2, 1])
    assert torch.equal(joined, together) and same is shared
    assert type(nested["a"]) is list and torch.equal(nested["a"][0], together)
    assert none is None and text == "x"


DIFFERENT = {
    "shapes": [numbers(2, 3), numbers(1, 4)],
    "a shared tensor's values": [numbers(3, 3), -numbers(3, 3)],
    "types": [numbers(2, 3), None],
    "keys": [{"b": 1}, {"c": 1}],
    "lengths": [(1,), (1, 1)],
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_arguments_that_differ_in_more_than_rows(what):
    with pytest.raises(NotSliceable, match="'a' differs between samples"):
        concatenate_argument("a", DIFFERENT[what], [2, 1])


@pytest.mark.parametrize(
    "shape", [(B, 1, n, n), (1, H, n, n), (B, H, n, n + 2), (B, 1, 1, n), (1, 1, 1, n), (n, n)]
)
def test_a_row_of_a_recorded_mask(shape):
    mask, key = numbers(*shape), numbers(B, H, n, 2)
    found = mask_rows(AttentionCall(key, key, mask, False), ROWS.on(mask.device))
    whole = mask.view(*[1] * (4 - mask.dim()), *shape).expand(B, -1, n, -1)
    expected = torch.stack([whole[b, :, t : t + 1, :n] for b, t in PLACES])
    assert torch.equal(found, expected)


def test_a_recorded_attention_without_a_mask():
    key, at = numbers(B, H, n, 2), ROWS.on(torch.device("cpu"))
    assert mask_rows(AttentionCall(key, key, None, False), at) is None
    expected = torch.tensor([[[[s <= t for s in range(n)]]] for _, t in PLACES])
    assert torch.equal(mask_rows(AttentionCall(key, key, None, True), at), expected)
    with pytest.raises(NotSliceable, match="attention mask of type str"):
        mask_rows(AttentionCall(key, key, "causal", False), at)
