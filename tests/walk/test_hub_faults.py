"""A hub that answers badly about some revisions does not stop the others: the real client, a local server, one walk."""

import hashlib
import io
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from checkpoints import __main__ as command_line
from tests.hub_server import serve
from tests.walk.test_walk import STEPS, commit, snapshots
from tracker import pythia
from tracker.store.results import Store

REPO = "org/faulty"
ALWAYS = 10**6
LISTING, CONFIG, WEIGHTS = (
    "GET /api/models/{}/revision/{}",
    "GET /{}/resolve/{}/config",
    "GET /{}/resolve/{}/model.safet",
)


def listing(change=lambda content: content, times=ALWAYS, **fault):
    return LISTING, {"content": change, "times": times} | fault


def edited(**entries):
    """Change the entries of the weight file in a listing."""

    def change(content: bytes) -> bytes:
        info = json.loads(content)
        next(f for f in info["siblings"] if f["rfilename"].endswith(".safetensors")).update(entries)
        return json.dumps(info).encode()

    return listing(change)


def answered(status: int, where: str = LISTING, times: int = ALWAYS, **headers: str):
    return where, {"status": status, "times": times, "headers": {k.replace("_", "-"): v for k, v in headers.items()}}


LOOP = "LOOP"  # a redirect to the same address
CAN_NOT_BE_READ = r"the files of .* sends an answer that can't be read \({}.*run the same command again later"
# What is wrong, and what the walk says about the revision.
FAULTS = {
    "listing redirects in circles": (answered(302, Location=LOOP), "the files of .* redirects the request without end"),
    "weights redirect in circles": (answered(302, WEIGHTS, Location=LOOP), "model.safetensors of .* without end"),
    "config redirects in circles": (answered(302, CONFIG, Location=LOOP), "config.json of .* without end"),
    "redirect to nowhere": (answered(302, WEIGHTS), "answers 302 Found"),
    "size in words": (edited(size="many"), CAN_NOT_BE_READ.format("ValueError: it lists 'model.safetensors' with size 'many'")),
    "negative size": (edited(size=-1), CAN_NOT_BE_READ.format("ValueError.*size -1")),
    "size NaN": (edited(size=float("nan")), CAN_NOT_BE_READ.format("ValueError.*size nan")),
    "size of an exabyte": (edited(size=10**18), "does not fit on the disk"),
    "hash that is an object": (
        edited(lfs={"sha256": {}, "size": 1, "pointerSize": 1}),
        CAN_NOT_BE_READ.format("ValueError.*SHA-256 {}"),
    ),
    "hash that leaves the cache": (
        edited(lfs={"sha256": "../../x", "size": 1, "pointerSize": 1}),
        CAN_NOT_BE_READ.format("ValueError.*x'"),
    ),
    "no name": (edited(rfilename=None), CAN_NOT_BE_READ.format("ValueError: it lists None")),
    "name that leaves the cache": (edited(rfilename="../../evil.py"), CAN_NOT_BE_READ.format("ValueError.*evil.py")),
    "name with NUL": (edited(rfilename="a\0.json"), CAN_NOT_BE_READ.format("ValueError: it lists .a.x00.json")),
    "name with half a character": (edited(rfilename="\ud800.json"), CAN_NOT_BE_READ.format("ValueError.*ud800")),
    "name of 300 characters": (edited(rfilename="x" * 300), CAN_NOT_BE_READ.format("ValueError.*xxx")),
    "truncated JSON": (listing(lambda content: content[: len(content) // 2]), CAN_NOT_BE_READ.format("JSONDecodeError")),
    "log-in page": (listing(lambda content: b"<html>Welcome</html>"), CAN_NOT_BE_READ.format("JSONDecodeError")),
    "JSON list": (listing(lambda content: b"[1]"), CAN_NOT_BE_READ.format("TypeError")),
    "files without names": (listing(lambda content: b'{"id": "a", "siblings": [{}]}'), CAN_NOT_BE_READ.format("KeyError")),
    "nested JSON": (listing(lambda content: b"[" * 10**6), CAN_NOT_BE_READ.format("RecursionError")),
    "listing of another commit": (
        listing(lambda content: re.sub(rb'"sha": "\w+"', b'"sha": "main"', content)),
        CAN_NOT_BE_READ.format("ValueError: it is about the commit 'main'"),
    ),
    "204 for the listing": (answered(204), CAN_NOT_BE_READ.format("JSONDecodeError")),
    "204 for weights": (answered(204, WEIGHTS), "model.safetensors of .* answers 204 No Content"),
    "204 for the config": (answered(204, CONFIG), "config.json of .* answers 204 No Content"),
    "401 for the listing": (answered(401), "the files of .* asks for a token .401.*no token is in use: log in with `hf auth"),
    "401 for the config": (answered(401, CONFIG), "config.json of .* asks for a token"),
    "403": (answered(403, WEIGHTS, X_Error_Message="no access"), "model.safetensors of .* forbids it .403 Forbidden .no access"),
    "gated": (answered(403, CONFIG, X_Error_Code="GatedRepo"), "config.json of .*model is gated, and no token .*accept its"),
    "404 for the repository": (answered(404, X_Error_Code="RepoNotFound"), "the hub has no such repository, or it is private"),
    "404 for a file": (answered(404, CONFIG, X_Error_Code="EntryNotFound"), "config.json of .* is no longer on the hub as"),
    "418": (answered(418, WEIGHTS), "model.safetensors of .* answers 418 I'm a Teapot"),
    "418 for the listing": (answered(418), "the files of .* answers 418 I'm a Teapot"),
    "busy for a day": (answered(429, Retry_After="86400"), "429 Too Many Requests, 2 attempts; it asks for a pause of 86,400 s"),
    "busy for a day, config": (answered(429, CONFIG, Retry_After="86400"), "config.json of .* asks for a pause of 86,400 s"),
    "busy for ever": (answered(503, WEIGHTS, Retry_After="9" * 400), "asks for a pause of years"),
    "busy until 2200": (answered(503, WEIGHTS, Retry_After="Wed, 31 Dec 2200 23:59:59 GMT"), "asks for a pause of years"),
    "rate limit of a day": (answered(429, WEIGHTS, ratelimit='"api";r=0;t=86400'), "asks for a pause of 86,401 s"),
    "rate limit of 5,000 digits": (
        answered(429, WEIGHTS, ratelimit=f'"api";r=0;t={"9" * 5000}'),
        "model.safetensors of .* can't be read .ValueError: Exceeds the limit",
    ),
    "always busy": (answered(503, WEIGHTS), "model.safetensors of .*503 Service Unavailable, 6 attempts"),
    "listing reset": ((LISTING, {"reset": True, "times": ALWAYS}), "the files of .*ReadError: .*reset by peer, 6 attempts"),
    "config reset": ((CONFIG, {"reset": True, "times": ALWAYS}), "config.json of .*ReadError: .*reset by peer, 6 attempts"),
    "weights dropped": ((WEIGHTS, {"drop_after": 100, "times": ALWAYS}), "model.safetensors of .*RemoteProtocol.*6 attempts"),
    "other config": ((CONFIG, {"content": lambda c: c[::-1], "times": ALWAYS}), "config.json of .* does not match its git hash"),
}  # fmt: skip
# Faults that do not last, and what the walk says before it tries again.
PASSING = {
    "busy": (answered(503, times=2), r"the files of .*: 503 Service Unavailable; trying again in 0 s \(2 of 5\)"),
    "internal error": (answered(500, CONFIG, times=1), "config.json of .*: 500 Internal Server Error; trying again in 0 s"),
    "busy until yesterday": (
        answered(429, CONFIG, times=1, Retry_After="Fri, 31 Dec 1999 23:59:59 GMT"),
        r"config.json of .*: 429 Too Many Requests; trying again in 0 s \(2 of 5\)",
    ),
    "busy for no number": (answered(503, WEIGHTS, times=1, Retry_After="soon"), r"model.safetensors of .* in 0 s \(1 of 5\)"),
    "busy for a superscript": (answered(503, WEIGHTS, times=1, Retry_After="²"), r"model.safetensors of .* in 0 s \(2 of 5\)"),
    "busy for minus a second": (answered(503, WEIGHTS, times=1, Retry_After="-1"), r"model.safetensors of .* in 0 s \(3 of 5\)"),
    "dropped": ((WEIGHTS, {"drop_after": 20_000}), r"model.safetensors of .*RemoteProtocol.* in 0 s \(4 of 5\)"),
}  # fmt: skip
SOUND = (1, 1000)  # before and after the faulty ones; the passing faults are in the second
STEP_OF = dict.fromkeys(PASSING, SOUND[1]) | {name: step for step, name in enumerate(FAULTS, SOUND[0] + 1)}


def publish(suite: Path, root: Path, step: int) -> str:
    """Publish a checkpoint of its own weights; return its commit."""
    repository = root / f"models--{REPO.replace('/', '--')}"
    digest = hashlib.sha1(f"{step}".encode()).hexdigest()
    snapshot = shutil.copytree(snapshots(suite) / commit(suite, STEPS[-1]), repository / "snapshots" / digest)
    weights = load_file(snapshot / "model.safetensors")
    (snapshot / "model.safetensors").unlink()
    weights["gpt_neox.final_layer_norm.bias"] += step * 1e-6
    save_file(weights, snapshot / "model.safetensors", metadata={"format": "pt"})
    (snapshot / "config.json").write_text((snapshot / "config.json").read_text() + " " * step)  # a file of its own
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / f"step{step}").write_text(digest)
    return digest


@pytest.fixture(scope="module")
def walked(suite, tmp_path_factory):
    """Walk over a served suite in which the hub answers badly about all but one revision, of one not for long."""
    directory = tmp_path_factory.mktemp("hub")
    commits = {step: publish(suite, directory / "served", step) for step in {*SOUND, *STEP_OF.values()}}
    (directory / "prompts.txt").write_text("import os\nfor name in sorted(names)\n")
    with serve(directory / "served") as server, pytest.MonkeyPatch.context() as patch:
        for name, ((where, fault), _) in (FAULTS | PASSING).items():
            path = where.format(REPO, commits[STEP_OF[name]])
            if fault.get("headers", {}).get("Location") == LOOP:
                file = {CONFIG: "config.json", WEIGHTS: "model.safetensors"}.get(where, "")
                fault["headers"]["Location"] = (
                    path.removeprefix("GET ").rpartition("/")[0] + f"/{file}" if file else path[4:]
                )
            server.fail(path, **fault)
        patch.setenv("TRACKER_CACHE", str(directory / "ours"))
        patch.delenv("HF_TOKEN", raising=False)
        for name, value in {
            "HF_HUB_CACHE": str(directory / "cache"),
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(directory / "no-token"),
            "ENDPOINT": server.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        patch.setattr("checkpoints.retries.LONGEST_WAIT", 0.02)
        patch.setattr("sys.stdout", out := io.TextIOWrapper(io.BytesIO(), "utf-8"))  # as strict as a terminal
        patch.setattr("sys.stderr", err := io.StringIO())
        started = time.monotonic()
        given = ["--model", REPO, "--prompts", str(directory / "prompts.txt"), "--k", "2", "--measures", "coupling"]
        status = pythia.main([*given, "--out", str(directory / "out"), "--loggers=", "--device", "cpu"])
        seconds = time.monotonic() - started
        out.seek(0)
        yield directory, status, out.read(), err.getvalue(), seconds


@pytest.mark.slow
def test_the_other_revisions_are_measured(walked):
    directory, status, out, err, seconds = walked
    assert status == 1 and "Traceback" not in err
    assert Store(directory / "out").steps() == list(SOUND)
    assert (directory / "out" / "report.html").exists()
    assert seconds < 120
    assert (
        "the hub asks for a pause of 86,400 s, and this program waits at most 330 s; trying again in 0 s instead" in out
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_one_line_says_why(walked, name):
    *_, err, _ = walked
    lines = [line for line in err.splitlines() if re.match(rf"failed: [^:]*step[^:]*\b{STEP_OF[name]}\b[^:]*:", line)]
    assert len(lines) == 1, err
    assert re.search(FAULTS[name][1], lines[0]), lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSING)
def test_passing_faults_are_retried(walked, name):
    _, _, out, _, _ = walked
    assert re.search(PASSING[name][1], out), out


@pytest.mark.slow
def test_unlisted_revisions_are_shown(walked, capsys):
    assert command_line.main(["list", REPO, "--steps", f"1,{STEP_OF['log-in page']}"]) == 1
    assert "can't be read" in capsys.readouterr().out
