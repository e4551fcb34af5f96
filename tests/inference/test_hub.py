"""Models at hf:// addresses, and exports pushed to the Hub: real processes, a local server."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import slowfast_lara
from slowfast_lara.config import get_cfg
from slowfast_lara.config.keys import all_keys, get_value
from slowfast_lara.config.load import with_overrides
from slowfast_lara.errors import InputError
from slowfast_lara.inference.export import export
from slowfast_lara.inference.export_folder import without_paths
from slowfast_lara.inference.load import load
from tests.helpers.hub_folders import write_folder
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


def export_program(model, folder, *more: str) -> str:
    """A program that exports the model with `slowfast-lara export`."""
    words = ["export", str(folder), "--cfg", model.cfg, "--checkpoint", model.checkpoint, *more]
    return f"import sys\nfrom slowfast_lara.cli import main\nsys.exit(main({words!r}))"


OLD = """
import slowfast_lara
print(slowfast_lara.load("hf://some-user/old").path)
"""


def test_model_without_safetensors(tmp_path):
    """Older models, among them Google's ViViT and Meta's TimeSformer, have only a PyTorch file."""
    folder = tmp_path / "hub" / "some-user" / "old" / "main"
    write_folder(folder, "vivit")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"not needed")
    with hub_server(tmp_path / "hub") as (hub, address):
        done = run(OLD, address, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("pytorch_model.bin")
    assert not any("training_args.bin" in path for path in hub.requests)


def test_push(tmp_path, model):
    """The export is committed to a private model; neither token nor path is in its files."""
    secret = tmp_path / "secret-place"
    secret.mkdir()
    (secret / "mine.py").touch()
    words = ["--push", "user/model", "--import", str(secret / "mine.py")]
    words += ["DATA.PATH_TO_DATA_DIR", str(secret / "k400")]
    program = export_program(model, secret / "out", *words)
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
    config = json.loads(files["config.json"])["config"]
    assert config["DATA"]["PATH_TO_DATA_DIR"] == "" and config["IMPORTS"] == ["mine.py"]


def test_no_key_of_a_pushed_config_holds_a_path(trained):
    word = re.compile(r"DIR$|LIST$|WEIGHTS$|PREFIX$|FILE_PATH$|RESULTS_PATH$")
    defaults = get_cfg()
    keys = [key for key in all_keys() if word.search(key) and type(get_value(defaults, key)) is str]
    cfg = with_overrides(trained.cfg, dict.fromkeys(keys, "/secret-place"))
    assert cfg.dump().count("/secret-place") == len(keys) >= 13
    assert "/secret-place" not in without_paths(cfg).dump()


def test_nothing_is_pushed_unless_asked(tmp_path, model):
    with hub_server(tmp_path / "hub") as (hub, address):
        done = run(export_program(model, tmp_path / "out"), address, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "pushed to" not in done.stdout and hub.requests == []


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
