"""A local server with the part of the Hugging Face Hub's interface that models need."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Files of repositories by revision, and what was asked for and committed."""

    def __init__(self, root: Path) -> None:
        self.root = root  # USER/MODEL/REVISION/FILE
        self.requests: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.commits: dict[str, dict[str, bytes]] = {}


def _commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def _description(file: Path) -> dict[str, Any]:
    body = file.read_bytes()
    oid = hashlib.sha1(body).hexdigest()
    return {"type": "file", "path": file.name, "size": len(body), "oid": oid}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content: Any, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(content).encode(), status, Content_Type="application/json", **headers)

    def do_GET(self) -> None:
        path = unquote(self.path).split("?")[0].strip("/")
        self.hub.requests.append(path)
        parts = path.split("/")
        if parts[:2] == ["api", "models"] and "revision" in parts:
            repository, revision = "/".join(parts[2:4]), parts[-1]
            folder = self.hub.root / repository / revision
            if not folder.is_dir():
                code = "RevisionNotFound" if folder.parent.is_dir() else "RepoNotFound"
                self._json({"error": "not found"}, 404, X_Error_Code=code)
                return
            files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
            sha = _commit(revision)
            self._json({"id": repository, "modelId": repository, "sha": sha, "siblings": files})
        elif parts[:2] == ["api", "models"] and "tree" in parts:
            folder = self._folder("/".join(parts[2:4]), parts[5])
            files = sorted(folder.iterdir()) if folder else []
            self._json([_description(file) for file in files])
        elif "resolve" in parts:
            folder, name = self._folder("/".join(parts[:2]), parts[3]), "/".join(parts[4:])
            if folder and (folder / name).is_file():
                body = (folder / name).read_bytes()
                etag = f'"{hashlib.sha1(body).hexdigest()}"'
                self._send(body, ETag=etag, X_Repo_Commit=_commit(folder.name))
            else:
                self._json({"error": "not found"}, 404, X_Error_Code="EntryNotFound")
        else:
            self._json({"error": "not found"}, 404)

    do_HEAD = do_GET

    def _folder(self, repository: str, revision: str) -> Path | None:
        """The folder of a revision, given by its name or commit."""
        for folder in (self.hub.root / repository).iterdir():
            if revision in (folder.name, _commit(folder.name)):
                return folder
        return None

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path).split("?")[0].strip("/")
        self.hub.requests.append(path)
        if path == "api/repos/create":
            self.hub.created.append(json.loads(body))
            self._json({"url": f"http://{self.headers['Host']}/user/model"})
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif "/commit/" in path:
            files = {}
            for line in filter(None, body.splitlines()):
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.hub.commits["/".join(path.split("/")[2:4])] = files
            address = f"http://{self.headers['Host']}/user/model/commit/{SHA}"
            self._json({"success": True, "commitOid": SHA, "commitUrl": address})
        else:
            self._json({})


@contextlib.contextmanager
def hub_server(root: Path) -> Iterator[tuple[Hub, str]]:
    """Serve the repositories in `root`; yields the hub and its address."""
    hub = Hub(root)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
