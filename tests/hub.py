"""A fake of the Hugging Face Hub: as much of its HTTP interface as `huggingface_hub` uses for models, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard
from yaml import YAMLError

Files = dict[str, bytes]


@dataclass
class Hub:
    """Repositories: each a list of revisions, oldest first; the last one is `main`."""

    address: str = ""
    repositories: dict[str, list[tuple[str, Files]]] = field(default_factory=dict)
    cards: list[str] = field(default_factory=list)  # that were handed in to be validated
    requests: list[str] = field(default_factory=list)

    def revision(self, name: str, wanted: str) -> tuple[str, Files] | None:
        known = self.repositories[name]
        return known[-1] if wanted == "main" else next((r for r in known if r[0] == wanted), None)

    def commit(self, name: str, files: Files) -> str:
        known = self.repositories.setdefault(name, [])
        text = repr((len(known), sorted((k, hashlib.sha1(v).hexdigest()) for k, v in files.items())))
        known.append((hashlib.sha1(text.encode()).hexdigest(), files))
        return known[-1][0]

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that is to take this for the Hub."""
        return {
            **os.environ, "HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_TOKEN": "hf_test",
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, code: int, data: Any, **headers: str) -> None:
        self._send(code, json.dumps(data).encode(), Content_Type="application/json", **headers)

    def _error(self, kind: str) -> None:
        self._json(404, {"error": kind}, X_Error_Code=kind, X_Error_Message=kind)

    def _any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if name not in self.hub.repositories:
                self.hub.commit(name, {".gitattributes": b""})
            return self._json(200, {"url": f"{self.hub.address}/{name}", "name": name, "id": name})
        if path == "/api/validate-yaml":
            self.hub.cards.append(content := json.loads(body)["content"])
            try:
                ModelCard(content)  # which reads the metadata by the library's own schema
            except (ValueError, YAMLError) as error:
                return self._json(400, {"errors": [{"message": str(error)}], "warnings": []})
            return self._json(200, {"errors": [], "warnings": []})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|preupload|commit|tree)/([^/]+))?(?:/.*)?", path)
        if found:
            return self._api(found[1], found[2] or "revision", found[3] or "main", body)
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found:
            return self._file(*found.groups())
        return self._error("EntryNotFound")

    do_GET = do_HEAD = do_POST = _any

    def _api(self, name: str, what: str, wanted: str, body: bytes) -> None:
        if name not in self.hub.repositories:
            return self._error("RepoNotFound")
        revision = self.hub.revision(name, wanted)
        if revision is None:
            return self._error("RevisionNotFound")
        sha, files = revision
        if what == "preupload":
            answer = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._json(200, {"files": answer})
        if what == "commit":
            changed = dict(files)
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    changed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del changed[line["value"]["path"]]
            oid = self.hub.commit(name, changed)
            url = f"{self.hub.address}/{name}/commit/{oid}"
            return self._json(200, {"success": True, "commitOid": oid, "commitUrl": url})
        if what == "tree":
            rows = [
                {"type": "file", "path": k, "size": len(v), "oid": hashlib.sha1(v).hexdigest()}
                for k, v in files.items()
            ]
            return self._json(200, rows)
        siblings = [{"rfilename": file} for file in files]
        return self._json(200, {"id": name, "modelId": name, "sha": sha, "siblings": siblings, "private": False})

    def _file(self, name: str, wanted: str, file: str) -> None:
        if name not in self.hub.repositories:
            return self._error("RepoNotFound")
        revision = self.hub.revision(name, wanted)
        if revision is None:
            return self._error("RevisionNotFound")
        if file not in revision[1]:
            return self._error("EntryNotFound")
        content = revision[1][file]
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self._send(200, content, ETag=etag, X_Repo_Commit=revision[0], Accept_Ranges="bytes")


@contextmanager
def fake_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
