"""A small W&B server on this machine: it takes runs, their rows and files, and fails from a moment on."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Literal

from tests.support.hub_server import serving

Fault = Literal["hang", "refuse"]
KEY = "a" * 40
BUCKET = {
    "id": "run", "name": "run", "displayName": "run", "description": "", "config": "{}", "sweepName": "",
    "project": {"id": "project", "internalId": "1", "name": "project", "entity": {"id": "entity", "name": "entity"}},
    "historyLineCount": 0,
}  # fmt: skip
VIEWER = {
    "id": "1",
    "entity": "entity",
    "username": "user",
    "email": "",
    "flags": "{}",
    "teams": {"edges": []},
}
SERVER = {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []}


class WandbServer:
    """What a server received, and how it fails.

    Attributes:
        fault: returns how it answers a request: it never answers, refuses the key (401), or None.
        rows: how many lines of history it accepted.
    """

    def __init__(self):
        self.fault = lambda: None
        self.rows = 0
        self.closed = threading.Event()
        self.address = ""

    def answer(self, path: str, body: dict) -> dict:
        """Return the answer to a request."""
        if path.endswith("/file_stream"):
            self.rows += len(
                body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            )
            return {}
        given = body.get("variables", {})
        names, run = given.get("files", []), given.get("name", "run")
        return {
            "data": {
                "viewer": VIEWER,
                "serverInfo": SERVER,
                "model": {"bucket": None},
                "upsertBucket": {"bucket": BUCKET | {"name": run}, "inserted": True},
                "createRunFiles": {
                    "runID": "run",
                    "uploadHeaders": [],
                    "files": [
                        {"name": name, "uploadUrl": f"{self.address}/upload/{name}"}
                        for name in names
                    ],
                },
            }
        }


@contextmanager
def serve() -> Iterator[WandbServer]:
    """Run a server in a thread."""
    state = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            is_json = "json" in self.headers.get("Content-Type", "")
            fail = state.fault()
            if fail == "hang":
                state.closed.wait()
                self.close_connection = True
                return
            status = 401 if fail == "refuse" else 200
            answer = json.dumps(
                state.answer(self.path, json.loads(content)) if status == 200 and is_json else {}
            ).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST

        def log_message(self, *_):
            pass

    with serving(Handler) as state.address:
        try:
            yield state
        finally:
            state.closed.set()
