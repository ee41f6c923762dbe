"""A local server that speaks enough of the hub's protocol for the real huggingface_hub client.

It serves the repositories of a directory laid out like the hub's cache (models--ORG--NAME/refs, /snapshots).
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class Handler(BaseHTTPRequestHandler):
    root: Path
    requests: list[str]

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool):
        self.requests.append(f"{self.command} {self.path}")
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 5:
            repo, what = self.repo(parts[2], parts[3]), parts[4]
            if not repo.is_dir():
                return self.error(404, "RepoNotFound")
            if what == "refs":
                names = [file.name for file in (repo / "refs").iterdir() if not file.name.startswith(".")]
                branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": "0" * 40} for n in names]
                return self.reply(json.dumps({"branches": branches, "converts": [], "tags": []}).encode(), body)
            commit = self.commit(repo, parts[5])
            if commit is None:
                return self.error(404, "RevisionNotFound")
            files = sorted(path for path in (repo / "snapshots" / commit).iterdir())
            if what == "tree":
                tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _sha(f)[:40]} for f in files]
                return self.reply(json.dumps(tree).encode(), body)
            info = {"id": "/".join(parts[2:4]), "sha": commit, "siblings": [{"rfilename": f.name} for f in files]}
            return self.reply(json.dumps(info).encode(), body)
        if len(parts) == 5 and parts[2] == "resolve":
            repo = self.repo(parts[0], parts[1])
            commit = self.commit(repo, parts[3])
            if commit is None:
                return self.error(404, "RevisionNotFound")
            file = repo / "snapshots" / commit / parts[4]
            if not file.is_file():
                return self.error(404, "EntryNotFound")
            headers = {"ETag": f'"{_sha(file)}"', "X-Repo-Commit": commit}
            return self.reply(file.read_bytes(), body, headers)
        return self.error(404, "RepoNotFound")

    def repo(self, organisation: str, name: str) -> Path:
        return self.root / f"models--{organisation}--{name}"

    def commit(self, repo: Path, revision: str) -> str | None:
        reference = repo / "refs" / revision
        if reference.is_file():
            return reference.read_text()
        return revision if (repo / "snapshots" / revision).is_dir() else None

    def reply(self, content: bytes, body: bool, headers: dict[str, str] | None = None):
        self.send_response(200)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def error(self, status: int, code: str):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `root`; yields the endpoint and the list of requests it has had."""
    requests: list[str] = []
    handler = type("BoundHandler", (Handler,), {"root": root, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
