"""Models at hf:// addresses, and exports pushed to the Hub: real processes, a local server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import slowfast_lara
from slowfast_lara.errors import InputError
from slowfast_lara.inference.export import export
from slowfast_lara.inference.load import load
from tests.helpers.hub_server import hub_server
from tests.helpers.preloaded import environment

TOKEN = "hf_secretsecretsecretsecret"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model):
    return load(model.cfg, model.checkpoint)


def run(program: str, address: str, cache) -> subprocess.CompletedProcess[str]:
    env = {
        **environment(),
        "HF_ENDPOINT": address,
        "HF_HOME": str(cache),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


LOAD = """
import sys, torch, slowfast_lara
from slowfast_lara.errors import UserError
for revision in (None, "v1", "v2"):
    model = slowfast_lara.load("hf://some-user/some.model", revision=revision)
    print(model.network.head.bias[0].item(), file=sys.stderr)
for address, revision in (("hf://some-user/some.model", "none"), ("hf://some-user/absent", None)):
    try:
        slowfast_lara.load(address, revision=revision)
    except UserError as error:
        print("ERROR", repr(str(error)), file=sys.stderr)
"""


def test_load_by_revision(tmp_path, trained):
    for number, revision in enumerate(("main", "v1", "v2"), start=1):
        with torch.no_grad():
            trained.network.head.bias[0] = number
        folder = tmp_path / "hub" / "some-user" / "some.model" / revision
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(trained, folder)
        (folder / "training.bin").write_bytes(b"not needed")
    with hub_server(tmp_path / "hub") as (hub, address):
        done = run(LOAD, address, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if line in ("1.0", "2.0", "3.0")] == ["1.0", "2.0", "3.0"]
    errors = [line for line in lines if line.startswith("ERROR")]
    assert len(errors) == 2
    assert all("cannot download hf://some-user/" in error for error in errors)
    assert all("\\n" not in error for error in errors)
    assert TOKEN not in done.stderr + done.stdout
    assert not any("training.bin" in path for path in hub.requests)


def test_push(tmp_path, model):
    """The export is committed to a private model; neither token nor path is in its files."""
    secret = tmp_path / "secret-place"
    words = ["export", str(secret / "out"), "--cfg", model.cfg, "--checkpoint", model.checkpoint]
    words += ["--push", "user/model", "DATA.PATH_TO_DATA_DIR", str(secret / "k400")]
    program = f"import sys\nfrom slowfast_lara.cli import main\nsys.exit(main({words!r}))"
    secret.mkdir()
    with hub_server(tmp_path / "hub") as (hub, address):
        done = run(program, address, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "pushed to hf://user/model" in done.stdout
    files = hub.commits["user/model"]
    assert {"README.md", "config.json", "model.safetensors"} <= set(files)
    assert hub.created[0].get("private") is True or hub.created[0]["visibility"] == "private"
    for content in files.values():
        assert b"secret-place" not in content and TOKEN.encode() not in content
    assert TOKEN not in done.stdout + done.stderr
    card = files["README.md"].decode()
    assert card.startswith("---\n") and "pipeline_tag: video-classification" in card
    assert json.loads(files["config.json"])["config"]["DATA"]["PATH_TO_DATA_DIR"] == ""


def test_nothing_is_pushed_unless_asked(tmp_path, trained):
    with hub_server(tmp_path / "hub") as (hub, _):
        assert "pushed" not in export(trained, tmp_path / "out")
    assert hub.requests == []


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "../x", "user/mo del", "user/", "-a/b"])
def test_bad_names(tmp_path, trained, name):
    with pytest.raises(InputError, match="USER/MODEL"):
        slowfast_lara.load(f"hf://{name}")
    with pytest.raises(InputError, match="USER/MODEL"):
        export(trained, tmp_path / "out", push=name)
    assert not (tmp_path / "out").exists()


def test_revision_of_a_folder(tmp_path):
    with pytest.raises(InputError, match="revision is 'v1'"):
        slowfast_lara.load(tmp_path, revision="v1")
