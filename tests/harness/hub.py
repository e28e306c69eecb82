"""A Hugging Face Hub of a test's own on 127.0.0.1, for one commit of each repository at a time."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class FakeHub:
    """``repositories``: files by name, of ``models/org/name`` or ``datasets/org/name``. ``downloads``: what was asked
    for with GET. ``tokens``: the authorization of requests. A push changes the commit, and earlier commits stay."""

    def __init__(self) -> None:
        self.url = ""
        self.downloads: list[str] = []
        self.tokens: set[str] = set()
        self._heads: dict[str, str] = {}
        self._commits: dict[tuple[str, str], dict[str, bytes]] = {}

    def push(self, repository: str, files: Mapping[str, bytes]) -> str:
        """Make ``files`` the content of a repository. Returns the commit."""
        digest = hashlib.sha1(repository.encode())
        for name, content in sorted(files.items()):
            digest.update(name.encode() + content)
        commit = self._heads[repository] = digest.hexdigest()
        self._commits[repository, commit] = dict(files)
        return commit

    def api(self, path: str) -> Any:
        """The answer to ``/api/PATH``; None if there is none."""
        kind, org, name, what, revision, *_ = [*path.split("/"), "", "", "", ""]
        repository = f"{kind}/{org}/{name}"
        commit = self._heads.get(repository, "") if revision in ("", "main") else revision
        files = self._commits.get((repository, commit))
        if files is None:
            return None
        if what == "tree":
            return [self._entry(file, content) for file, content in files.items()]
        return {
            "id": f"{org}/{name}",
            "sha": commit,
            "siblings": [{"rfilename": file} for file in files],
            "private": False,
            "downloads": 0,
            "tags": [],
        }

    def file(self, path: str) -> tuple[str, bytes] | None:
        """Commit and content for ``[datasets/]org/name/resolve/COMMIT/FILE``."""
        repository, _, rest = path.partition("/resolve/")
        repository = repository if repository.startswith("datasets/") else f"models/{repository}"
        commit, _, name = rest.partition("/")
        commit = self._heads.get(repository, "") if commit == "main" else commit
        content = self._commits.get((repository, commit), {}).get(name)
        return None if content is None else (commit, content)

    def _entry(self, file: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_words: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        path = unquote(urlsplit(self.path).path).strip("/")
        headers: dict[str, str] = {}
        if path.startswith("api/"):
            found = self.hub.api(path.removeprefix("api/"))
            body, is_there = json.dumps(found or {}).encode(), found is not None
        else:
            file = self.hub.file(path)
            body, is_there = (b"", False) if file is None else (file[1], True)
            if file is not None:
                headers = {"X-Repo-Commit": file[0], "ETag": f'"{hashlib.sha1(file[1]).hexdigest()}"'}
            if with_body:
                self.hub.downloads.append(path)
        self.send_response(200 if is_there else 404)
        if not is_there:
            headers["X-Error-Code"] = "RepoNotFound"
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve one for the length of the block."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
