"""Tests of the names, steps and scores of the published suites."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import nano, scores
from checkpoints.load import load_tokenizer
from checkpoints.suites import PAPER_STEPS, PYTHIA_STEPS, find_files, find_suite
from tests.conftest import TINY
from tests.support.files import holding
from tests.support.suite import commit
from tracker.common.errors import CheckpointError


def test_pythia_publishes_154_checkpoints():
    suite = find_suite("12b")
    assert suite.source == "EleutherAI/pythia-12b" and suite.name == "pythia-12b"
    assert len(suite.steps) == len(set(suite.steps)) == 154 and suite.steps[-1] == 143_000
    assert suite.checkpoints[-1].revision == "step143000"
    assert suite.checkpoints[-1].tokens == 143_000 * 2_097_152  # 299.9 billion


PARAMETERS = {
    "14m": 14_067_712, "31m": 30_494_720, "70m": 70_426_624, "160m": 162_322_944, "410m": 405_334_016,
    "1b": 1_011_781_632, "1.4b": 1_414_647_808, "2.8b": 2_775_208_960, "6.9b": 6_857_302_016, "12b": 11_846_072_320,
}  # fmt: skip


@pytest.mark.parametrize("size", PARAMETERS)
def test_shapes_of_pythia_ship(size):
    """The parameters are those of published models, and of the model that transformers builds from the configuration."""
    assert find_suite(size).shape.parameters == PARAMETERS[size]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(find_suite(size).shape.config())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[size]


def test_the_size_of_a_published_file():
    """Compare with model.safetensors of EleutherAI/pythia-70m-deduped, 166,029,852 bytes, which has a header too."""
    assert find_suite("70m-deduped").shape.file_bytes == pytest.approx(166_029_852, rel=1e-4)


@pytest.mark.parametrize(
    "variant", ["160m-weight-seed1", "160m-data-seed3", "14m-seed9", "12b-deduped"]
)
def test_published_variants_are_suites_of_their_own(variant):
    for name in (variant, f"pythia-{variant}", f"EleutherAI/pythia-{variant}"):
        suite = find_suite(name)
        assert (suite.name, suite.source) == (f"pythia-{variant}", f"EleutherAI/pythia-{variant}")
        assert suite.steps == PYTHIA_STEPS and suite.checkpoints[1].tokens == 2_097_152
        assert suite.shape == find_suite(variant.partition("-")[0]).shape


OTHERS = (
    "EleutherAI/pythia-160m-v0",
    "EleutherAI/pythia-70m-weight-seed1",
    "EleutherAI/160m",
    "org/pythia-160m-weight-seed1",
)


@pytest.mark.parametrize("repo", OTHERS)
def test_a_repository_that_is_no_published_pythia_is_one_like_any_other(repo, monkeypatch):
    branches(monkeypatch, "main", "step0", "step5")
    suite = find_suite(repo)
    assert (suite.source, suite.steps) == (repo, (0, 5)) and suite.checkpoints[1].tokens is None


@pytest.mark.parametrize(
    "name", ["14m-deduped", "70m-weight-seed1", "160m-data-seed4", "410m-seed10", "12b-final"]
)
def test_unpublished_variants_are_refused(name):
    with pytest.raises(ValueError, match="-seed1 to -seed9"):
        find_suite(name)


@pytest.mark.parametrize("given", ["", "epoch=0-step=10.ckpt"], ids=["directory", "file"])
def test_lightning_checkpoints_without_a_module_name_the_flag(tmp_path, given):
    path = holding(tmp_path, "epoch=0-step=10.ckpt", "last.ckpt") / given
    with pytest.raises(
        ValueError,
        match=r"10\.ckpt.*--module package\.module:Class, and --tokenizer NAME or --inputs FILE",
    ):
        find_suite(str(path))
    assert find_suite(str(path), lightning=True).steps == (10,)


def test_other_files_than_the_flags_ask_for(tmp_path):
    path = holding(tmp_path, "step8/config.json")
    with pytest.raises(
        ValueError, match="config.json is a file: give the directory of a checkpoint"
    ):
        find_suite(str(path / "step8" / "config.json"))
    for directory in (path, path / "step8"):
        with pytest.raises(
            ValueError, match="holds checkpoints of Hugging Face: leave out --module"
        ):
            find_suite(str(directory), lightning=True)
    assert find_suite(str(path)).steps == find_suite(str(path / "step8")).steps == (8,)


INSIDE = (
    "",
    "hub",
    "hub/models--org--a-b",
    "hub/models--org--a-b/snapshots",
    "hub/models--org--a-b/refs",
)


@pytest.mark.parametrize("given", INSIDE)
@pytest.mark.parametrize("flag", ["--model", "--tokenizer"])
def test_a_path_in_the_cache_of_the_hub_names_what_to_run(tmp_path, given, flag):
    cache = (
        holding(tmp_path / "of hub", f"hub/models--org--a-b/snapshots/{'1' * 40}/config.json")
        / "hub"
    )
    holding(
        cache,
        "models--org--a-b/refs/main",
        "datasets--org--c/refs/main",
        "models--broken/refs/main",
    )
    command = f"org/a-b: set HF_HUB_CACHE .*HF_HUB_CACHE='{cache}' python -m tracker.pythia {flag} org/a-b$"
    with pytest.raises(ValueError, match=command):
        (find_suite if flag == "--model" else load_tokenizer)(str(tmp_path / "of hub" / given))


def test_checkpoints_that_are_incomplete_stay_in_the_suite(tmp_path):
    """A walk fails on them, and names them at its end."""
    files = [
        "step1/config.json",
        "step2/model.safetensors",
        "step8/config.json",
        "eval-step8/metrics.json",
        "step9.txt",
        "logs/a",
    ]
    path = holding(tmp_path, *files)
    (path / "step4").mkdir()
    (path / "step16").symlink_to("step16")
    assert [checkpoint.step for checkpoint in find_suite(str(path)).checkpoints] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    "name", ["../nothere", "./run", "/data/run", "results/run/units", ".hidden"]
)
def test_a_path_that_is_no_directory_is_named_as_such(name):
    """It is not asked for on the hub, whose client calls the connection bad."""
    with pytest.raises(
        ValueError, match=f"^no directory {name}, and it can't be the name of a repository"
    ):
        find_suite(name)


def test_selections_of_steps():
    suite = find_suite("6.9b")
    chosen = {
        choice: [c.step for c in suite.select(choice)]
        for choice in ("paper", "all", "log2", "128,143000")
    }
    assert chosen["paper"] == list(PAPER_STEPS) == [c.step for c in suite.select(None)]
    assert chosen["paper"] == [
        128,
        256,
        512,
        1000,
        2000,
        4000,
        8000,
        16000,
        32000,
        64000,
        128000,
        143000,
    ]
    assert chosen["all"] == list(PYTHIA_STEPS) and chosen["128,143000"] == [128, 143_000]
    assert chosen["log2"] == [0, 1, 2, 4, 8, 16, 32, 64, *PAPER_STEPS]
    scored = [c.step for c in suite.select("scores", scores.load_published(suite))]
    assert len(scored) == 27 and scored[:3] == [0, 1, 2] and 143_000 in scored
    assert [c.step for c in find_suite("nano").select(None)] == list(nano.STEPS)


def test_scores_are_joined_by_exact_step():
    twelve = scores.load_published(find_suite("12b"))
    # Copied from the table: pythia-12b, zero-shot, 143000, arc_easy, acc.
    assert twelve[143_000]["arc_easy"] == 0.702441 and 2000 not in twelve
    tasks = [value for task, value in twelve[143_000].items() if task != scores.MEAN]
    assert twelve[143_000][scores.MEAN] == pytest.approx(sum(tasks) / len(tasks))
    assert scores.load_published(find_suite("1b"))[143_000]  # spelled pythia-1b-bf16 in the table


@pytest.mark.parametrize(
    "model, revisions, joined",
    [
        ("EleutherAI/pythia-70m", r"step(?P<step>\d+)", True),
        ("EleutherAI/pythia-70m", r"early_(?P<step>\d+)", False),
        ("me/pythia-70m", None, False),
        ("directory", None, False),
        ("files", None, False),
        ("14m", None, False),
    ],
)
def test_published_scores_are_of_the_published_weights(
    model, revisions, joined, tmp_path, monkeypatch
):
    branches(monkeypatch, "main", "step512", "early_512")
    directory = tmp_path / "pythia-70m"
    (directory / "step512").mkdir(parents=True)
    (directory / "step512" / "config.json").touch()
    given = str(directory) if model == "directory" else model
    suite = find_files(f"{directory}/*") if model == "files" else find_suite(given, revisions)
    assert 512 in suite.steps and (512 in scores.load_published(suite)) == joined


@pytest.mark.slow
def test_each_seed_of_nano_has_a_suite(suite, tmp_path, monkeypatch):
    """The same seed trains the same weights: test_live_equals_walked."""
    monkeypatch.setenv("TRACKER_CACHE", str(tmp_path))
    other = nano.train(seed=1, recipe=TINY)
    assert nano.is_trained(seed=1, recipe=TINY) and not nano.is_trained(recipe=TINY)
    commits = {commit(path, 0) for path in (suite, other)}
    assert len(commits) == 2


def test_nano_is_loaded_by_step(suite, monkeypatch):
    monkeypatch.setenv("TRACKER_CACHE", str(suite.parent.parent))
    untrained, tokenizer = nano.load(0, recipe=TINY)
    trained, _ = nano.load(max(TINY.steps), recipe=TINY)
    assert nano.cache_dir(recipe=TINY) == suite
    assert tokenizer("import os")["input_ids"]
    assert not torch.equal(*(next(model.parameters()) for model in (untrained, trained)))
    with pytest.raises(CheckpointError, match=r"nano has no step 3; choose from 0, "):
        nano.load(3, recipe=TINY)


def test_nano_has_pythias_configuration():
    config = nano.build(nano.NanoRecipe()).config
    assert config.use_parallel_residual and not config.tie_word_embeddings
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert (config.num_hidden_layers, config.hidden_size) == (6, 128)


def test_nano_is_initialised_as_pythia():
    model = nano.build(nano.NanoRecipe())
    writes, others = 2 / (6 * 128**0.5), (2 / (5 * 128)) ** 0.5  # 6 layers, 128 wide
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    assert len(matrices) == 2 + 6 * 4
    for name, weight in matrices.items():
        expected = writes if "attention.dense." in name or "dense_4h_to_h" in name else others
        assert (
            float(weight.std()) == pytest.approx(expected, rel=0.03)
            and abs(float(weight.mean())) < 0.002
        ), name


def test_rate_of_nano_rises_and_falls():
    recipe = nano.NanoRecipe(warm_up=4, steps=(0, 12))
    rates = [recipe.rate_at(t) for t in range(13)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1 and rates[8] == pytest.approx(0.55) and rates[12] == pytest.approx(0.1)


def test_embeddings_of_nano_learn_faster_and_matrices_of_blocks_decay(tmp_path):
    recipe = nano.NanoRecipe(layers=2, width=32, vocabulary=64, context=16, length=16)
    module = nano._module(recipe, None, torch.zeros(16, dtype=torch.long), tmp_path)
    names = {id(weight): name for name, weight in module.model.named_parameters()}
    groups = module.configure_optimizers()["optimizer"].param_groups
    embeddings, blocks, others = (
        [names.pop(id(weight)) for weight in group["params"]] for group in groups
    )
    assert not names and embeddings == ["gpt_neox.embed_in.weight"] and len(blocks) == 2 * 4
    assert all(
        "layers." in name and name.endswith(".weight") and "layernorm" not in name
        for name in blocks
    )
    assert "gpt_neox.layers.0.mlp.dense_h_to_4h.bias" in others
    assert [group["initial_lr"] for group in groups] == pytest.approx([20 * 2e-3, 2e-3, 2e-3])
    assert [group["weight_decay"] for group in groups] == [0, 3, 0.1]


def branches(monkeypatch, *names: str):
    monkeypatch.setattr(
        "checkpoints.hub.list_branches", lambda repo, notify=print: (dict.fromkeys(names, "c"), "")
    )


OLMO_2 = [
    "main",
    *(f"stage1-step{step}" for step in ("1000-tokens5B", "150-tokens1B", "928646-tokens3896B")),
]
OLMO_2 += [f"stage2-ingredient{i}-step1000-tokens5B" for i in (1, 2, 10)]


def test_olmo_branches_state_tokens(monkeypatch):
    branches(
        monkeypatch,
        "main",
        "step1000-tokens4B",
        "step557000-tokens2463B",
        "step0-tokens0B",
        "preview",
    )
    suite = find_suite("allenai/OLMo-7B-hf")
    assert [(c.step, c.tokens) for c in suite.checkpoints] == [
        (0, 0),
        (1000, 4 * 10**9),
        (557_000, 2463 * 10**9),
    ]


def test_olmo_2_is_walked_one_stage_at_a_time(monkeypatch):
    branches(monkeypatch, *OLMO_2)
    suite = find_suite("allenai/OLMo-2-1124-7B")
    assert suite.name == "OLMo-2-1124-7B-stage1" and suite.steps == (150, 1000, 928_646)
    assert suite.checkpoints[0].tokens == 10**9
    assert "trained in 4 stages: this is stage1" in suite.notice
    second = find_suite("allenai/OLMo-2-1124-7B", stage="stage2-ingredient2")
    assert [c.revision for c in second.checkpoints] == ["stage2-ingredient2-step1000-tokens5B"]
    with pytest.raises(
        ValueError,
        match="no such stage.*stage1, stage2-ingredient1, stage2-ingredient2, stage2-ingredient10",
    ):
        find_suite("allenai/OLMo-2-1124-7B", stage="stage3")


def test_regular_expression_selects_revisions_of_any_repository(monkeypatch):
    branches(monkeypatch, "main", "ckpt_100", "ckpt_20", "ema_20")
    suite = find_suite("org/amber", revisions=r"^ckpt_(?P<step>\d+)$")
    assert suite.steps == (20, 100)
    assert suite.checkpoints[0].revision == "ckpt_20"
    assert suite.checkpoints[0].tokens is None
    with pytest.raises(ValueError, match="ckpt_20 and ema_20 are both step 20"):
        find_suite("org/amber", revisions=r"(?P<step>\d+)")
    staged = find_suite("org/amber", revisions=r"(?P<stage>ema|ckpt)_(?P<step>\d+)", stage="ema")
    assert staged.steps == (20,)
    wrong = {
        r"(\d+)": "no group named step",
        "(": "not a regular expression",
        r"x(?P<step>\d)": "no branch of org/amber matches",
    }
    for pattern, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            find_suite("org/amber", revisions=pattern)


TABLES = {
    "long": "model,step,task,value\npythia-70m,0,piqa,0.5\npythia-70m,512,piqa,0.6\npythia-160m,512,piqa,0.9\n",
    "wide": "step,piqa,sciq\n0,0.5,\n512,0.6,0.7\n",
}


@pytest.mark.parametrize("form", TABLES)
def test_scores_are_read_from_a_users_table(tmp_path, form):
    (tmp_path / "scores.csv").write_text(TABLES[form])
    found = scores.read_user_scores(tmp_path / "scores.csv", find_suite("70m"))
    assert found[0] == {"piqa": 0.5} and found[512]["piqa"] == 0.6
    assert found[512].keys() == ({"piqa"} if form == "long" else {"piqa", "sciq"})
    assert "scores: 1 of 3 checkpoints" in scores.describe_coverage(
        found, [256, 512, 1000], "a file"
    )


def harness(revision: str, **results) -> str:
    return json.dumps(
        {
            "results": {
                task: {"alias": task, "acc,none": value, "acc_stderr,none": 0.01}
                for task, value in results.items()
            }
            | {"wikitext": {"word_perplexity,none": 20.0}},
            "group_subtasks": {"mmlu": ["mmlu_anatomy"]},
            "config": {
                "model_args": f"pretrained=EleutherAI/pythia-70m,revision={revision},dtype=float32"
            },
        }
    )


def test_results_of_the_evaluation_harness_are_joined_by_revision(tmp_path):
    for step, value in ((512, 0.5), (1000, 0.6)):
        (tmp_path / f"step{step}").mkdir()
        (tmp_path / f"step{step}" / "results.json").write_text(
            harness(f"step{step}", mmlu=value, mmlu_anatomy=0.1)
        )
    found = scores.read_user_scores(tmp_path, find_suite("70m"))
    assert found == {512: {"mmlu": 0.5, "wikitext": 20.0}, 1000: {"mmlu": 0.6, "wikitext": 20.0}}
    with pytest.raises(
        ValueError, match="no scores of pythia-160m.*EleutherAI/pythia-70m at step1000"
    ):
        scores.read_user_scores(tmp_path, find_suite("160m"))


@pytest.mark.parametrize(
    "content, message",
    [
        ("task,value\npiqa,0.5\n", "neither a table with the columns step"),
        ("step,task,value\nten,piqa,0.5\n", "line 2 of"),
        (
            "step,task,value\n1,piqa,0.5\n1,piqa,0.6\n",
            "is 0.5 in line 2 of .* and 0.6 in line 3 of .*; keep one",
        ),
        ("", "it contains no scores"),
    ],
)
def test_unusable_tables_are_refused(tmp_path, content, message):
    (tmp_path / "scores.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        scores.read_user_scores(tmp_path / "scores.csv", find_suite("70m"))


def test_missing_values_are_left_out_and_files_must_agree(tmp_path):
    (tmp_path / "a.csv").write_text("step,piqa,sciq\n1,0.5,nan\n1,0.5,nan\n")
    assert scores.read_user_scores(tmp_path, find_suite("70m")) == {1: {"piqa": 0.5}}
    (tmp_path / "b.csv").write_text("step,piqa\n1,0.6\n")
    with pytest.raises(
        ValueError, match="piqa at step 1 is 0.5 in .*a.csv and 0.6 in .*b.csv; keep one"
    ):
        scores.read_user_scores(tmp_path, find_suite("70m"))
