"""Walks over files that a function of the user loads: three ways in which small programs save, written by a program that ran."""

import os
import re
import shlex
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import peft
import pytest
import torch
import transformers

import tracker
from checkpoints.load import lightning_loader, load_model, name_of_loader, users_loader
from checkpoints.suites import find_files, find_suite
from tests.support import home_made
from tests.support.draws import normal
from tests.support.files import holding
from tests.support.lightning_runs import Toy
from tests.support.models import Size, images, language, timm_vit, tokens, vision
from tests.support.plain import gpt2
from tests.support.processes import ROOT
from tests.support.refused import refused
from tests.support.suite import checkpoint_of
from tracker import pythia
from tracker.store import Store
from tracker.walk.command import Walk

MODEL = """
import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)))

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        weights = scores.masked_fill(self.mask[:tokens, :tokens] == 0, float("-inf")).softmax(-1)
        return self.out((self.dropout(weights) @ v).transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, context)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=17, width=16, heads=2, depth=3, context=16):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
"""
TRAIN = """
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gpt import GPT


@dataclass
class Config:
    width: int = 16
    depth: int = 3


if __name__ == "__main__":
    torch.manual_seed(0)
    model = GPT(**asdict(Config()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ids = torch.randint(17, (8, 13))
    torch.save(ids[:2, :9], "ids.pt")
    for name in ("state", "compiled", "whole"):
        Path(name).mkdir()
    for step in range(1, 11):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 2, 10):
            content = {"model_state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "config": Config()}
            torch.save(content, f"state/epoch_{step}_loss_{loss.item():.3f}.pt")
            torch.save(torch.compile(model).state_dict(), f"compiled/step{step}.pth")
            torch.save(model, f"whole/model-{step}.bin")
    torch.save(model.state_dict(), "compiled/best.pth")
"""
LOADING = """
import __main__
import torch
from gpt import GPT
from train import Config

__main__.Config = Config


def state(path):
    content = torch.load(path, map_location="cpu", weights_only=False)
    model = GPT(width=content["config"].width, depth=content["config"].depth)
    model.load_state_dict(content["model_state_dict"])
    return model


def compiled(path):
    model = GPT()
    weights = torch.load(path, map_location="cpu")
    model.load_state_dict({name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()})
    return model


def whole(path):
    return torch.load(path, map_location="cpu", weights_only=False)
"""
SERIES = {"state": "state/epoch_*.pt", "compiled": "compiled/*.pth", "whole": "whole/model-*.bin"}


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run a Python command in a directory, as its user does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """The directory of a program that has trained a model written by hand, and has saved it at three steps, in three ways."""
    directory = tmp_path_factory.mktemp("program")
    forgetful = LOADING.replace("__main__.Config = Config", "")
    modules = {"gpt": MODEL, "train": TRAIN, "loading": LOADING, "forgetful": forgetful}
    for name, text in modules.items():
        (directory / f"{name}.py").write_text(text)
    trained = run(directory, "train.py")
    assert trained.returncode == 0, trained.stderr
    return directory


# As a user starts them one after the other; the first has not set __main__.Config, as the others do.
WALKS = """
import sys
from tracker.pythia import main

for module, way, pattern, status in {walks}:
    for stream in (sys.stdout, sys.stderr):
        print("--", module, way, file=stream, flush=True)
    flags = ["--inputs", "ids.pt", "--k", "4", "--final_norm", "exclude", "--wandb", "offline"]
    out = ["--out", f"{{sys.argv[1]}}/{{module}}/{{way}}"]
    assert main(["--files", pattern, "--load", f"{{module}}:{{way}}", *flags, *out]) == status
"""


@pytest.fixture(scope="module")
def walks(program, tmp_path_factory) -> SimpleNamespace:
    """Walk each series, in the directory of the program; what each walk printed, and the stores."""
    out = tmp_path_factory.mktemp("walks")
    series = [("loading", way, pattern, 0) for way, pattern in SERIES.items()]
    walks = [("forgetful", "state", SERIES["state"], 2), *series]
    ran = run(program, "-c", WALKS.format(walks=walks), str(out))
    assert ran.returncode == 0, ran.stderr
    printed = [
        dict(part.split("\n", 1) for part in stream.split("-- ")[1:])
        for stream in (ran.stdout, ran.stderr)
    ]
    return SimpleNamespace(path=out, out=printed[0], err=printed[1])


@pytest.fixture
def loading(program, monkeypatch):
    """The user's module, imported from the working directory."""
    monkeypatch.chdir(program)
    monkeypatch.syspath_prepend(program)
    import loading  # type: ignore[import-not-found]

    return loading


@pytest.mark.slow
@pytest.mark.parametrize("way", SERIES)
def test_a_series_is_walked_from_the_command_line(way, walks, program, loading):
    """Neither transformers nor Lightning knows these files; one note, and no warning, says how they are measured."""
    out, err = walks.out[f"loading {way}"], walks.err[f"loading {way}"]
    assert "warning" not in err
    assert err.count("with up to 9 times the operations (9 tokens)") == 1
    assert ("left out, without a step: best.pth" in out) is (way == "compiled")
    directory = walks.path / "loading" / way
    store = tracker.open_results(directory)
    assert list(store.step.values) == [1, 2, 10] and len(set(store.files_sha256.values)) == 3
    assert (directory / "report.html").is_file() and list(directory.rglob("*.wandb"))
    last = ("epoch_10", "step10", "model-10")
    (file,) = (file for file in program.glob(SERIES[way]) if file.name.startswith(last))
    ids, unit = torch.load(program / "ids.pt"), store.sel(step=10)
    measured = tracker.measure(getattr(loading, way)(file), ids, k=4, final_norm="exclude")
    np.testing.assert_allclose(unit.miscoupling, measured.miscoupling, rtol=1e-5)


@pytest.mark.slow
def test_classes_of_the_program_that_wrote_a_file_are_asked_for(walks):
    """Its own name was __main__, which now is the walk's; all files fail alike, and the walk ends."""
    assert "__main__.NAME = NAME" in walks.err["forgetful state"]


def test_a_function_walks_from_python_too(program, loading, tmp_path, capsys):
    """In any thread."""
    ids = torch.load(program / "ids.pt")
    walk = Walk(
        files=str(program / SERIES["state"]), load=loading.state, inputs=ids, wandb="off", out=tmp_path / "out",
        options={"k": (4,)},
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(pythia.run, walk).result() == 0
    assert pythia.run(walk) == 0
    assert "3 checkpoints, 3 already measured" in capsys.readouterr().out
    assert list(tracker.open_results(tmp_path / "out").step.values) == [1, 2, 10]
    walk.load = loading.compiled  # another function may load other weights of the same files
    assert pythia.run(walk) == 2
    assert "loading:compiled" in capsys.readouterr().err


FAULTS = {
    "weights only": (
        lambda path, loading: torch.load(path),
        "state/epoch_1_*",
        "UnpicklingError.*weights_only=False",
    ),
    "prefix": (
        lambda path, loading: loading.GPT().load_state_dict(torch.load(path)),
        "compiled/step1.pth",
        r"RuntimeError: Error.* loading state_dict .*removeprefix\('_orig_mod.'\)",
    ),
    "key": (
        lambda path, loading: torch.load(path)["model"],
        "compiled/step1.pth",
        r"\(KeyError: 'model'\); the file holds .*words",
    ),
    "tensors": (
        lambda path, loading: torch.load(path),
        "compiled/step1.pth",
        "returns a OrderedDict .*load_state_dict, and return it",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_the_function_is_named_with_its_cure(fault, program, loading):
    load, pattern, message = FAULTS[fault]
    (file,) = program.glob(pattern)
    with refused(message) as raised:
        users_loader(lambda path: load(path, loading))(file)
    assert str(file) in str(raised.value) and len(str(raised.value)) < 700


@pytest.mark.parametrize("name", ["none:load", "loading:none", "loading", "loading.", "a/b.py:c"])
@pytest.mark.parametrize(
    "find, kind", [(users_loader, "function"), (lightning_loader, "LightningModule")]
)
def test_code_that_is_not_there(find, kind, name, loading, program):
    why = "give the module's name, not its file: a.b:c" if "/" in name else ""
    said = rf"{name}: no such {kind} \(.*{why}.*; give module:{kind}.* from {program}$"
    with pytest.raises(ValueError, match=said):
        find(name)
    with pytest.raises(ValueError, match="loading:state: no such LightningModule"):
        lightning_loader("loading:state")


NAMES = """epoch_{}.pt epoch_{}_loss_2.345.pt loss0.25-iter{}k_final.pth v2/0.5B.{}.pt step_{}/model.pt 00{}.mp4 ckpt.{}
    model.pt.{}""".split()


@pytest.mark.parametrize("name", NAMES)
def test_the_step_is_the_last_whole_number_of_a_name(name, tmp_path, monkeypatch):
    """The directory has characters of a pattern in its name."""
    steps, run = (1, 2, 10), tmp_path / "run[7]"
    holding(run, *map(name.format, steps))
    monkeypatch.chdir(tmp_path)
    suite = find_files(f"run[7]/{name.format('*')}")
    sources = [checkpoint.source for checkpoint in suite.checkpoints]
    assert suite.steps == steps and sources == [str(run / name.format(step)) for step in steps]
    assert suite.name == ("v2" if name.startswith("v2") else "run[7]")
    first, last = (name.format(step).removeprefix("v2/") for step in (1, 10))
    said = f"steps are read from names: {first} is step 1, {last} is step 10"
    assert suite.notice == said


@pytest.mark.parametrize(
    "names", [("s_500.pt", "s_1k.pt"), ("s_1,000.pt", "s_20,500.pt"), ("s_10.pt", "s_1e4.pt")]
)
def test_a_number_that_is_a_part_of_the_step_is_refused(names, tmp_path):
    holding(tmp_path, *names)
    with pytest.raises(
        ValueError, match="the last whole number of .* is a part of the step; give --revisions"
    ):
        find_files(f"{tmp_path}/*.pt")


def test_functions_are_told_apart_by_their_names(tmp_path, capsys):
    for function in (users_loader, partial(users_loader)):
        assert name_of_loader(function) == "checkpoints.load:users_loader"
    assert walk(tmp_path, lambda path: vit(path), "s1.pt") == 2
    assert "load= is a lambda; give a function with a name" in capsys.readouterr().err


def test_steps_of_other_names(tmp_path):
    holding(tmp_path, "a1_e3.pt", "a2_e3.pt", "best.pt", "one/x.pt")
    with pytest.raises(
        ValueError,
        match=f"{tmp_path}/a1_e3.pt and {tmp_path}/a2_e3.pt are both step 3; .*--revisions",
    ):
        find_files(f"{tmp_path}/*.pt")
    suite = find_files(f"{tmp_path}/*.pt", revisions=r"a(?P<step>\d)_e3\.pt$")
    assert suite.steps == (1, 2) and suite.notice.endswith("left out, without a step: best.pt")
    with pytest.raises(
        ValueError, match="no step in the names of its files, best, one/x; --revisions"
    ):
        find_files(f"{tmp_path}/**/[bx]*.pt")
    with pytest.raises(
        ValueError,
        match=f"no file or directory matches it; there is a1_e3.pt, .*one in {tmp_path}$",
    ):
        find_files(f"{tmp_path}/*.pth")
    with pytest.raises(ValueError, match=f"there is no directory {tmp_path}/nowhere"):
        find_files(f"{tmp_path}/nowhere/*.pth")
    assert find_files(f"{tmp_path}/best.pt").steps == (1,)
    top, *below = tmp_path.parts[1:]
    assert find_files("/".join(["", f"{top[:-1]}?", *below, "a1*.pt"])).steps == (3,)


def test_directories_of_files_of_no_known_form_say_how_they_are_walked(tmp_path):
    files = holding(tmp_path / "my runs", *(f"epoch_{i}.pt" for i in range(20)), "log.txt")
    with pytest.raises(
        ValueError, match=r"holds 20 files of no known form, epoch_0\.pt, .*….*, epoch_9\.pt\."
    ) as raised:
        find_suite(str(files))
    assert f"--files '{files}/*.pt' --load my_module:load" in str(raised.value)
    assert "    def load(path):" in str(raised.value)
    holding(
        tmp_path / "deep",
        "step1/model.safetensors",
        "step1/optimizer.bin",
        "step2/model.safetensors",
    )
    with pytest.raises(ValueError, match=r"deep/\*\*/\*\.safetensors' --load"):
        find_suite(str(tmp_path / "deep"))
    for given in (f"{files}/epoch_0.pt", f"{files}/*.pt"):
        with pytest.raises(ValueError, match="--files takes .*--load my_module:load"):
            find_suite(given)


@pytest.mark.slow
def test_adapters_are_walked_by_the_lines_that_the_refusal_shows(tmp_path, monkeypatch):
    """Each is copied and hashed as other weights are, although only the user's function reads it."""
    language("LlamaForCausalLM")(Size()).save_pretrained(tmp_path / "base")
    for step in (2, 4, 6):
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        lora = peft.LoraConfig(
            target_modules=["q_proj"], r=4, task_type="CAUSAL_LM", init_lora_weights=False
        )
        peft.get_peft_model(base, lora).save_pretrained(tmp_path / "out" / f"checkpoint-{step}")
    torch.save(tokens(2), tmp_path / "FILE")
    with pytest.raises(
        ValueError, match="checkpoint-2, checkpoint-4, checkpoint-6 are adapters"
    ) as raised:
        find_suite(str(tmp_path / "out"))
    code, _, command = str(raised.value).split("\n\n", 1)[1].rpartition("\n\n")
    (tmp_path / "my_module.py").write_text(textwrap.dedent(code))
    monkeypatch.chdir(tmp_path)
    walk = shlex.split(command.partition("tracker.pythia ")[2])
    assert pythia.main([*walk, "--wandb", "off", "--k", "4", "--out", "store"]) == 0
    store = tracker.open_results(tmp_path / "store")
    assert list(store.step.values) == [2, 4, 6]
    assert len(set(store.files_sha256.values)) == len(set(store.fingerprint.values)) == 3
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "checkpoint-4")
    measured = tracker.measure(model, tokens(2), k=4)
    np.testing.assert_allclose(store.miscoupling.sel(step=4), measured.miscoupling, rtol=1e-5)


@pytest.mark.slow
def test_checkpoints_of_lightning_are_walked_with_inputs_or_with_a_tokenizer(
    walker, suite, tmp_path
):
    """By a module of the user."""
    trainer = lightning.Trainer(
        logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True
    )
    run, ids = tmp_path / "run", tmp_path / "inputs.pt"
    for step in (10, 200):
        trainer.strategy.connect(Toy(32))
        trainer.save_checkpoint(run / f"step={step}.ckpt", weights_only=True)
    torch.save(torch.randint(320, (2, 8)), ids)
    measured = {"--inputs": ids, "--tokenizer": checkpoint_of(suite, 0)}
    for (option, value), samples in zip(measured.items(), (2, 3), strict=True):
        out = str(tmp_path / option)
        module = ("--module", "tests.support.lightning_runs:Toy", option, str(value), "--out", out)
        assert walker.main(*module, model=str(run)) == 0
        ds = tracker.open_results(out)
        assert ds.step.values.tolist() == [10, 200] and ds.sizes["prompt"] == samples
        assert len(set(ds.fingerprint.values)) == 2


def vit(path: Path) -> torch.nn.Module:
    return timm_vit()


def not_finite(path: Path) -> torch.nn.Module:
    model = vit(path)
    model.head.weight.data.fill_(torch.nan)
    return model


def of_transformers(path: Path) -> torch.nn.Module:
    return gpt2(depth=2)


def walk(directory: Path, load, *names: str, inputs=None, **options) -> int:
    """Walk files of these names."""
    measured = {"k": (2,), "measures": ("coupling",)}
    pattern = str(holding(directory, *names) / "*.pt")
    inputs = images() if inputs is None else inputs
    given = {"inputs": inputs, "out": directory / "out", "wandb": "off", "options": measured}
    return pythia.run(Walk(files=pattern, load=load, **given, **options))


def test_paths_that_are_no_files_are_named_and_the_others_are_measured(tmp_path, capsys):
    """At the class token, which the walk names."""
    (tmp_path / "s_2.pt").symlink_to("s_2.pt")
    (tmp_path / "s_3.pt").symlink_to("gone")
    os.mkfifo(tmp_path / "s_4.pt")
    os.mknod(tmp_path / "s_5.pt", stat.S_IFSOCK | 0o600)
    names = ("s_1.pt", "s_9.pt")
    assert walk(tmp_path, vit, *names, dry_run=True) == 0
    assert "not estimated" not in capsys.readouterr().out
    assert walk(tmp_path, vit, *names) == 1
    store, printed = Store(tmp_path / "out"), capsys.readouterr().out
    assert store.steps() == [1, 9] and store.shared("tokens") == "cls"
    link, other = "a link that leads nowhere", "no file or directory"
    for step, what in enumerate((link, link, other, other), 2):
        assert f"s_{step}.pt is {what}: restore it" in store.skipped()[step]
    assert "2 samples, class token, or last token of a model without one; cpu" in printed
    assert "K=2, class token)" in printed and "2 samples, K = 2, class token;" in printed


REFUSED = {
    f"s_{2**63}/config.json": (b"", "is read as step 9223372036854775808, and numbers from 0"),
    "s-9999999999999B_1/config.json": (b"", "is read as step 1, and numbers from 0"),
    os.fsdecode(b"s_2\xff/config.json"): (b"", "is not in UTF-8, .*rename it"),
    "list/adapter_config.json": (b"[]", "is damaged: it holds a list.*; restore it"),
    "binary/adapter_config.json": (b"\xff\xfe\x00", "is damaged .*; restore it"),
    "nested/adapter_config.json": (b"[" * 100_000, "is damaged .*; restore it"),
}


@pytest.mark.parametrize("name", REFUSED, ids=range(len(REFUSED)))
def test_names_and_texts_that_no_walk_can_use_are_refused_before_it(name, tmp_path):
    content, said = REFUSED[name]
    (holding(tmp_path, name) / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        find_suite(str(tmp_path), r"(?:(?P<tokens>\d+)B)?_(?P<step>\d+)")


@pytest.mark.parametrize("load, status", [(torch.load, 2), (not_finite, 1)])
def test_a_series_that_fails_alike_ends_early(load, status, tmp_path, capsys):
    """Whatever the names are."""
    names = ("a1.pt", "b2.pt", "c3.pt", "d4.pt", "e5.pt")
    assert walk(tmp_path, load, *names) == status
    out, err = capsys.readouterr()
    assert out.count("FAILED") == 3 and err.count("error: ") == 1


def test_an_untrained_model_beside_files(tmp_path, capsys):
    """Of transformers' classes, whose initialisation is known; of others, what to do."""
    ids = torch.tensor([[1, 2, 3]])
    assert walk(tmp_path, of_transformers, "s1.pt", inputs=ids, untrained=3) == 0
    units = tracker.open_results(tmp_path / "out")
    assert units.revision.values.tolist() == ["untrained, seed 3", ""]
    assert len(set(units.fingerprint.values)) == 2
    assert walk(tmp_path / "own", vit, "s1.pt", untrained=3) == 1
    assert "VisionTransformer is initialised; save it before" in capsys.readouterr().err
    assert Store(tmp_path / "own" / "out").steps() == [1]


def towers(path: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    return home_made.TwoTowers(home_made.Torch)


def test_blocks_that_a_walk_proposes_are_measured(tmp_path, capsys):
    inputs = normal(2, 4, home_made.WIDTH)
    assert walk(tmp_path, towers, "s1.pt", inputs=inputs) == 2
    _, blocks = shlex.split(re.search("--blocks .*?  #", capsys.readouterr().err)[0], True)
    assert walk(tmp_path, towers, "s1.pt", inputs=inputs, blocks=blocks) == 0
    expected = tracker.measure(towers(tmp_path), inputs, blocks=blocks, k=2)
    found = tracker.open_results(tmp_path / "out").miscoupling[0]
    np.testing.assert_array_equal(found, expected.miscoupling)


@pytest.mark.parametrize(
    "name", "BertForSequenceClassification GPT2DoubleHeadsModel LlamaModel ViTModel".split()
)
def test_a_checkpoint_is_loaded_as_the_model_that_its_configuration_names(name, tmp_path):
    saved = (vision if name.startswith("ViT") else language)(name)(Size())
    saved.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded) is type(saved)
    torch.testing.assert_close(loaded.state_dict(), saved.state_dict())
