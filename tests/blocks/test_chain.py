"""The whole chain of blocks, or a reason: lists of several classes, and blocks outside their list."""

import pytest
import torch
from torch import nn

import tracker
from tests.support.compared import measured_as_by_brute_force
from tests.support.home_made import LM, MLP, Flat, PreNorm
from tests.support.home_made import Torch as Attending
from tests.support.models import WIDTH, neox, tokens
from tests.support.refusals import K, lines, refusal


class OnlyConvolving(nn.Module):
    """A block without a matrix."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class Convolving(OnlyConvolving):
    """Without attention; as in Jamba, Griffin or xLSTM, in one list with it."""

    def __init__(self):
        super().__init__()
        self.mlp = PreNorm(MLP())

    def forward(self, x):
        return self.mlp(super().forward(x))


class Dense(PreNorm):
    """A first layer that moves no information between tokens."""

    def __init__(self):
        super().__init__(MLP())


KINDS = {"A": Attending, "C": Convolving, "O": OnlyConvolving, "F": Flat, "D": Dense}


def model(kinds: str, before: str = "", after: str = "") -> LM:
    """Return a model with a block of each kind in its list, and before and after it."""
    torch.manual_seed(0)
    outside = [[(f"{part}{i}", KINDS[kind]()) for i, kind in enumerate(named)] for part, named in
               (("first", before), ("last", after))]  # fmt: skip
    first, last = outside
    return LM([KINDS[kind]() for kind in kinds], before=first, after=last).double().eval()


def names_of(kinds: str) -> list[str]:
    return [f"blocks.{i}" for i in range(len(kinds))]


@pytest.mark.parametrize("kinds", ["ACCA", "CCCA", "ACAC", "FFCF", "AACC", "AOOA", "FCFC"])
def test_a_list_of_several_classes_is_measured_whole(kinds):
    ds = measured_as_by_brute_force(model(kinds), tokens(), names_of(kinds))
    assert ds.attrs["final_norm_module"] == "norm"


def test_a_first_block_whose_class_is_there_once_is_offered_with_the_others():
    assert lines(refusal(model("CAAA")))[0] == "blocks"


@pytest.mark.parametrize(
    "kinds, before, after, names",
    [
        ("AA", "", "A", ["blocks.0", "blocks.1", "last0"]),
        ("AA", "A", "", ["first0", "blocks.0", "blocks.1"]),
        ("AA", "CA", "AC", ["first0", "first1", "blocks.0", "blocks.1", "last0", "last1"]),
        ("FF", "F", "C", ["first0", "blocks.0", "blocks.1", "last0"]),
        ("AA", "DA", "", ["first0", "first1", "blocks.0", "blocks.1"]),
        ("AACC", "", "A", ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "last0"]),
    ],
)
def test_blocks_outside_the_list_are_proposed_with_it(kinds, before, after, names):
    network = model(kinds, before=before, after=after)
    message = refusal(network)
    assert "are not the whole chain of blocks" in message
    assert lines(message) == [names, "blocks"]
    measured_as_by_brute_force(network, tokens(), names, blocks=names)
    part = tracker.measure(network, tokens(), k=K, blocks="blocks")  # the caller may mean a part
    assert part.attrs["final_norm_module"] == ("" if after else "norm")


def test_the_norm_inside_the_next_block_is_no_final_norm():
    network = model("AACC")
    part = tracker.measure(network, tokens(), k=K, blocks=["blocks.0", "blocks.1"])
    assert part.attrs["final_norm"] == "exclude" and part.attrs["final_norm_module"] == ""


def test_a_warning_names_what_adds_and_moves_nothing_between_tokens():
    network = model("AA", before="D", after="DD")
    with pytest.warns(
        UserWarning, match="first0 gives the first one its input and last0 takes the last one's"
    ) as warned:
        ds = measured_as_by_brute_force(network, tokens(), ["blocks.0", "blocks.1"])
    assert ds.attrs["blocks"] == "blocks.0, blocks.1"
    (text,) = [str(w.message) for w in warned if "first0 gives" in str(w.message)]
    (names,) = lines(text)
    measured_as_by_brute_force(network, tokens(), names, blocks=names)
    assert names == ["first0", "blocks.0", "blocks.1", "last0", "last1"]
    # A projection that starts at zero hides nothing.
    nn.init.zeros_(network.get_submodule("last0").fn.down.weight)
    with pytest.warns(UserWarning, match="last0 takes the last one's"):
        tracker.measure(network, tokens(), k=K, measures="trajectory")


class Positions(nn.Module):
    """Learned positions and dropout: x + p."""

    def __init__(self):
        super().__init__()
        self.p, self.dropout = nn.Parameter(torch.randn(1, 32, WIDTH)), nn.Dropout(0.1)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.dropout(x + self.p[:, : x.shape[1]])


def projection():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def test_what_is_no_block_next_to_the_blocks_is_no_reason_to_refuse():
    norms = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    before = [("positions", Positions()), ("norms", norms), ("project", projection())]
    after = [("transform", nn.Sequential(nn.LayerNorm(WIDTH), projection()))]
    network = LM(Attending, before=before, after=after)
    ds = tracker.measure(network, tokens(), k=K)
    assert ds.attrs["blocks"] == "blocks.0, blocks.1, blocks.2"
    assert ds.attrs["final_norm_module"] == "transform.0"
    blocks = Attending(), Convolving(), Attending()
    in_list = nn.Sequential(Positions(), *blocks, nn.LayerNorm(WIDTH), projection())
    assert tracker.measure(in_list, torch.randn(2, 6, WIDTH), k=K).attrs["blocks"] == "1, 2, 3"


@pytest.mark.parametrize("kind", [Attending, Convolving])
def test_a_declared_list_is_followed_too(kind):
    class Longer(type(neox())):
        """A Hugging Face model with one more layer after those that its config declares."""

        def __init__(self, config):
            super().__init__(config)
            self.gpt_neox.final_layer_norm = nn.Sequential(kind(), self.gpt_neox.final_layer_norm)

    network = Longer(neox().config)
    message = refusal(network)
    assert "gpt_neox.final_layer_norm.0 takes the last one's output" in message
    assert (
        lines(message)[0][-1] == "gpt_neox.final_layer_norm.0"
        and lines(message)[1] == "gpt_neox.layers"
    )


def test_layers_that_move_nothing_between_tokens_in_a_list_of_several_classes():
    message = refusal(model("AADD"))
    assert lines(message)[0] == "blocks"
    assert "blocks.2 takes the last one's output" in message


def test_before_measuring_a_list_of_several_classes_is_said_to_be_assumed():
    found = tracker.find_blocks(model("AACC"))
    assert len(found.names) == 4 and "assumed, and checked when measuring" in str(found)
    assert tracker.measure(model("AACC"), tokens(), k=K, blocks=found).sizes["layer"] == 4
    unchained = model("AADD")
    assert "no chain of blocks: 2 of them move no information" in refusal(
        unchained, blocks=tracker.find_blocks(unchained)
    )
