"""A local server for the real huggingface_hub client, with the needed part of the hub's protocol and planted faults.

It serves the repositories of a directory laid out like the hub's cache (models--ORG--NAME/refs, /snapshots, and
datasets--ORG--NAME). Weight files are in LFS: their ETag is their SHA-256; other files have a git hash.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest

WEIGHTS = (".safetensors", ".bin")


@dataclass
class Fault:
    """A fault in the first `times` requests that match `path`."""

    path: str  # regular expression, searched in "GET /path"
    times: int = 1
    status: int | None = None  # status of the answer
    # Of the answer; without a status, of a file in place of its own
    headers: dict[str, str] = field(default_factory=dict)
    drop_after: int | None = None  # number of bytes of the body before the connection is closed
    pause: Callable[[], object] = lambda: None  # called after each 64 kB of the body
    # Changes the content, under the hash of the original
    content: Callable[[bytes], bytes] = lambda content: content
    then: Callable[[], object] = lambda: None  # called before answering


@dataclass
class Hub:
    """The running server: its address, requests and faults."""

    endpoint: str = ""
    root: Path = Path()
    requests: list[str] = field(default_factory=list, repr=False)
    faults: list[Fault] = field(default_factory=list, repr=False)
    sent: int = 0  # bytes of file contents

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that uses this server."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": "0"}

    def be_used(self, patch: pytest.MonkeyPatch):
        """Let the client in this process use this server."""
        resolved = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        patch.setattr("huggingface_hub.constants.ENDPOINT", self.endpoint)
        patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", resolved)

    def fail(self, path: str, **how):
        self.faults.append(Fault(path, **how))

    def requested(self, path: str) -> list[str]:
        return [request for request in self.requests if re.search(path, request)]


class Handler(BaseHTTPRequestHandler):
    root: Path
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    do_POST = do_GET

    def answer(self, body: bool):
        request = f"{self.command} {unquote(self.path)}"
        self.hub.requests.append(request)
        fault = next(
            (f for f in self.hub.faults if f.times > 0 and re.search(f.path, request)), Fault("")
        )
        fault.times -= 1
        fault.then()
        if fault.status:
            return self.reply(b"", True, fault.headers, fault.status)
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        if parts[0] == "api" and parts[1] in ("models", "datasets") and len(parts) >= 4:
            repo, what = self.repo(*parts[1:4]), parts[4] if len(parts) > 4 else "revision"
            if not repo.is_dir():
                return self.error(404, "RepoNotFound")
            commit = self.commit(repo, parts[5] if len(parts) > 5 else "main")
            if what == "refs":
                branches = [
                    {"name": f.name, "ref": f"refs/heads/{f.name}", "targetCommit": f.read_text()}
                    for f in (repo / "refs").glob("[!.]*")
                ]
                found = {"branches": branches, "converts": [], "tags": []}
            elif commit is None:
                return self.error(404, "RevisionNotFound")
            elif what == "tree":
                found = listed(repo / "snapshots" / commit, "/".join(parts[6:]))
            elif what == "paths-info":
                sent = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                every = listed(repo / "snapshots" / commit, "")
                found = [entry for entry in every if entry["path"] in sent["paths"]]
            else:
                snapshot = repo / "snapshots" / commit
                files = filter(Path.is_file, sorted(snapshot.rglob("*")))
                siblings = [sibling(file, snapshot) for file in files]
                found = {"id": "/".join(parts[2:4]), "sha": commit, "siblings": siblings}
            return self.reply(fault.content(json.dumps(found).encode()), body)
        kind = "datasets" if parts[0] == "datasets" else "models"
        parts = parts[1:] if kind == "datasets" else parts
        if len(parts) >= 5 and parts[2] == "resolve":
            repo = self.repo(kind, parts[0], parts[1])
            commit = self.commit(repo, parts[3])
            if commit is None:
                return self.error(404, "RevisionNotFound")
            file = repo.joinpath("snapshots", commit, *parts[4:])
            if not file.is_file():
                return self.error(404, "EntryNotFound")
            return self.file(file, commit, body, fault)
        return self.error(404, "RepoNotFound")

    def file(self, file: Path, commit: str, body: bool, fault: Fault):
        content = fault.content(file.read_bytes())
        headers = {"ETag": f'"{blob(file)}"', "X-Repo-Commit": commit}
        headers |= fault.headers
        if not body:
            return self.reply(content, False, headers)
        requested = self.range_start()
        start = requested or 0
        if requested is not None:
            if start >= len(content):
                return self.reply(b"", True, {"Content-Range": f"bytes */{len(content)}"}, 416)
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.start(200 if requested is None else 206, headers, len(content) - start)
        end = (
            len(content)
            if fault.drop_after is None
            else min(len(content), start + fault.drop_after)
        )
        for at in range(start, end, 1 << 16):
            part = content[at : min(end, at + (1 << 16))]
            self.wfile.write(part)
            self.hub.sent += len(part)
            fault.pause()
        if end < len(content):
            self.close_connection = True

    def range_start(self) -> int | None:
        """Return the first byte of the requested range, or None without a range."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match else None

    def repo(self, kind: str, organisation: str, name: str) -> Path:
        return self.root / f"{kind}--{organisation}--{name}"

    def commit(self, repo: Path, revision: str) -> str | None:
        reference = repo / "refs" / revision
        if reference.is_file():
            return reference.read_text()
        return revision if (repo / "snapshots" / revision).is_dir() else None

    def reply(
        self, content: bytes, body: bool, headers: dict[str, str] | None = None, status: int = 200
    ):
        self.start(status, headers or {}, len(content))
        if body:
            self.wfile.write(content)

    def start(self, status: int, headers: dict[str, str], length: int):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()

    def error(self, status: int, code: str):
        self.reply(b"", True, {"X-Error-Code": code, "X-Error-Message": code}, status)


def listed(snapshot: Path, under: str) -> list[dict]:
    """Return the entries below a folder in the form of the hub's tree listing."""
    return [
        {"type": "directory", "path": str(path.relative_to(snapshot)), "oid": "0" * 40, "size": 0}
        if path.is_dir()
        else {
            "type": "file",
            "path": str(path.relative_to(snapshot)),
            "oid": git_hash(path),
            "size": path.stat().st_size,
        }
        for path in sorted((snapshot / under).rglob("*"))
    ]


def sibling(file: Path, snapshot: Path) -> dict:
    """Return a file's entry in the form of the hub's metadata."""
    described = {
        "rfilename": str(file.relative_to(snapshot)),
        "size": file.stat().st_size,
        "blobId": git_hash(file),
    }
    if file.name.endswith(WEIGHTS):
        described["lfs"] = {"sha256": blob(file), "size": file.stat().st_size, "pointerSize": 134}
    return described


def blob(file: Path) -> str:
    """Return the name of a file's blob in the cache."""
    return (
        hashlib.sha256(file.read_bytes()).hexdigest()
        if file.name.endswith(WEIGHTS)
        else git_hash(file)
    )


def git_hash(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(
        f"blob {len(content)}\0".encode() + content, usedforsecurity=False
    ).hexdigest()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """Say nothing of clients that were killed."""


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server of this machine."""
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serve(root: Path) -> Iterator[Hub]:
    """Serve the repositories below `root`."""
    hub = Hub(root=root)
    handler = type("BoundHandler", (Handler,), {"root": root, "hub": hub})
    with serving(handler) as hub.endpoint:
        yield hub
