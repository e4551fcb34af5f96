"""The demo server against clients that share it, misuse it, or come from other sites."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from tests.helpers.preloaded import environment
from tests.helpers.runs import wait_for

pytestmark = pytest.mark.slow
MULTIPART = {"Content-Type": "multipart/form-data; boundary=x"}
JSON = {"Content-Type": "application/json"}


class Client:
    """A client of the demo that speaks HTTP itself, with any headers."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, named)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def upload(
        self, content: bytes, name: str = "v.mp4", field: str = "files", **headers: str
    ) -> tuple[int, str]:
        head = f"--x\r\nContent-Disposition: form-data; name={field}; filename={name}\r\n\r\n"
        body = head.encode() + content + b"\r\n--x--\r\n"
        return self.ask("POST", "/gradio_api/upload", body, **{**MULTIPART, **headers})

    def read(self, path: str) -> tuple[int, Any]:
        """Ask the page to read a file; its message, or an HTTP error."""
        session = secrets.token_hex(8)
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        body = json.dumps({"data": [file], "fn_index": 0, "session_hash": session}).encode()
        status, text = self.ask("POST", "/gradio_api/queue/join", body, **JSON)
        if status != 200:
            return status, text
        _, events = self.ask("GET", f"/gradio_api/queue/data?session_hash={session}")
        messages = [json.loads(line[6:]) for line in events.splitlines() if line[:6] == "data: "]
        done = [event for event in messages if event["msg"] == "process_completed"]
        return 200, done[0]["output"].get("data", [done[0]["output"].get("error")])[0]


@pytest.fixture()
def client(served):
    return Client(served[0])


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"]


def test_clients_that_share_the_server(served, client, clips, tmp_path):
    """Equal files, files of others, folders and URLs; nothing is left, no path is shown."""
    temporary, video = tmp_path / "temporary", Path(clips[0]).read_bytes()
    paths = [json.loads(client.upload(video)[1])[0] for _ in range(4)]
    assert len({*paths}) == 4
    upload_folder = Path(os.path.commonpath(paths))
    outside = tmp_path / "outside.mp4"
    outside.write_bytes(video)
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.1)
        url = f"http://127.0.0.1:{other.getsockname()[1]}/v.mp4"
        folders = [upload_folder, upload_folder.parent, Path(paths[0]).parent, temporary]
        for bad in [*map(str, folders), str(outside), "", "..", "v.mp4", paths[0] + "/.", url]:
            status, text = client.read(bad)
            assert status == 403 and str(temporary) not in text
        with pytest.raises(TimeoutError):
            other.accept()
    both = json.dumps({"data": [{"path": path} for path in (paths[0], str(outside))]}).encode()
    assert client.ask("POST", "/gradio_api/queue/join", both, **JSON)[0] == 403
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda path=path: answers.append(client.read(path)))
        for path in paths
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers] == [200] * 4
    assert all("views. Now click" in text for _, text in answers), answers
    # Read files are gone, a second reading is refused, and no other file is left.
    assert client.read(paths[0])[0] == 403
    assert files_below(temporary) == [] and not [*upload_folder.iterdir()]
    served[1].send_signal(signal.SIGTERM)
    _, errors = served[1].communicate(timeout=30)
    assert (served[1].returncode, errors) == (0, "") and not any(temporary.iterdir())


def test_names_of_uploads(client, tmp_path):
    for name in ("../../up.mp4", "..", "", "a" * 400, "a%00b", "a\x07b", "ü\\..\\日.mp4"):
        status, text = client.upload(b"no video", f'"{name}"')
        (path,) = json.loads(text)
        assert status == 200 and Path(path).resolve().is_relative_to(tmp_path / "temporary")
        status, text = client.read(path)
        assert status == 200 and "Invalid data" in text and str(tmp_path) not in text


def test_other_sites_are_refused(served, client, clips, tmp_path):
    port, video = client.port, Path(clips[0]).read_bytes()
    own = [f"127.0.0.1:{port}", f"localhost:{port}", "localhost", "LOCALHOST:8000", "[::1]:80"]
    own += ["proxy.example", "PROXY.example:443", "other.example"]  # --allow-host
    assert {client.ask("GET", "/", Host=host)[0] for host in own} == {200}
    foreign = ["evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "10.0.0.1"]
    foreign += ["", "localhost@evil.example", "evil@localhost", "localhost/x", "[::1", "0.0.0.0"]
    for host in foreign:
        for method, path in (("GET", "/"), ("GET", "/config"), ("POST", "/gradio_api/queue/join")):
            assert client.ask(method, path, Host=host)[0] in (400, 421), host
        assert client.upload(video, Host=host)[0] in (400, 421)
    same = f"http://127.0.0.1:{port}"
    origins = ["http://evil.example", "null", "", f"{same}.evil.example", "http://127.0.0.1:1"]
    for origin in [*origins, f"http://localhost:{port}", f"{same}/x"]:
        assert client.upload(video, Origin=origin)[0] == 403, origin
    assert files_below(tmp_path / "temporary") == []
    assert client.upload(video, Origin=same)[0] == 200
    proxy = {"Host": "proxy.example", "Origin": "https://proxy.example"}
    assert client.upload(video, **proxy)[0] == 200


def test_browsers_are_told_to_load_nothing_from_other_servers(served):
    with urlopen(served[0]) as answer:
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_uploads_are_limited_in_size_and_in_total(served, client, tmp_path):
    """A file of 1 MB at most, and 5 MB for all files that wait; refused ones leave nothing."""
    temporary = tmp_path / "temporary"
    too_large = [client.upload(b"0" * size)[0] for size in (1_100_000, 3_000_000)]
    assert too_large == [413, 413]
    assert client.upload(b"0", field="other")[0] == 400
    assert client.ask("POST", "/gradio_api/upload", b"no form", **MULTIPART)[0] == 400
    recording = client.ask("POST", "/gradio_api/process_recording", b"--x" * 1000, **MULTIPART)
    assert recording[0] == 400
    assert client.ask("POST", "/gradio_api/queue/join", b"[" * 2_000_000)[0] == 413
    for cut in (b"", b"0" * 500_000):  # clients that leave during the upload
        with socket.create_connection((client.host, client.port)) as connection:
            head = "POST /gradio_api/upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000"
            head += "\r\nContent-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
            head += "Content-Disposition: form-data; name=files; filename=v.mp4\r\n\r\n"
            connection.sendall(head.encode() + cut)
    wait_for(lambda: files_below(temporary) == [])
    answers = [client.upload(b"0" * 900_000) for _ in range(8)]
    assert [status for status, _ in answers] == [200] * 5 + [507] * 3
    assert sum(path.stat().st_size for path in files_below(temporary)) == 5 * 900_000
    # A file that has been read makes room for another.
    assert client.read(json.loads(answers[0][1])[0])[0] == 200
    assert client.upload(b"0" * 900_000)[0] == 200 and client.upload(b"0" * 900_000)[0] == 507
    assert client.ask("GET", "/")[0] == 200


def test_port_in_use(served, client):
    flags = [*served[1].args[4:8], "--port", str(client.port)]
    again = [sys.executable, "-m", "slowfast_lara.cli", "demo", *flags]
    done = subprocess.run(again, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert str(client.port) in done.stderr
