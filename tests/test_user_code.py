"""`--import`: the attentions and datasets of docs/extend.md, in all processes of a command."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from slowfast_lara.cli import main
from slowfast_lara.config import load_config
from slowfast_lara.errors import ConfigError
from slowfast_lara.inference.load import load
from slowfast_lara.user_code import VARIABLE
from tests.cli.test_cli import BAD_FILES, code_of
from tests.helpers.launchers import start_node, start_spawning
from tests.helpers.runs import ROOT, finish, free_port, load_checkpoint, start, write_config
from tests.helpers.small_models import only_error

TOOL = ("-m", "slowfast_lara.cli")
STRIDED = ["VIT.APPROX_ATTN_TYPE", "strided", "VIT.STRIDED.STRIDE", "3"]
LAST = "checkpoint_epoch_00002.pyth"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> Path:
    """The folder with the complete files of docs/extend.md."""
    folder = tmp_path_factory.mktemp("recipes")
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    found = re.findall(r"`(\w+\.py)`, complete[^`]*```python\n(.*?)```", text, re.DOTALL)
    for name, code in found:
        (folder / name).write_text(code, encoding="utf-8")
    assert [name for name, _ in found] == ["my_attention.py", "my_dataset.py", "my_frames.py"]
    return folder


def command(*words: object, folder: Path | None = None) -> tuple[int, str, str]:
    return finish(start(*words, program=TOOL, folder=folder))


@pytest.fixture(scope="module")
def strided(recipes, video_set, tmp_path_factory) -> Path:
    """A run with the attention of the recipe, started in the folder of the file."""
    out = tmp_path_factory.mktemp("strided") / "out"
    config = write_config(out.parent / "c.yaml", video_set, out)
    words = ["run", "--import", "my_attention.py", "--cfg", config, *STRIDED]
    code, _, stderr = command(*words, folder=recipes)
    assert (code, stderr) == (0, "")
    return out


def test_recipe_of_an_attention(strided, recipes, video_set, tmp_path):
    path = str(recipes / "my_attention.py")
    saved = yaml.safe_load(load_checkpoint(strided, LAST)["cfg"])
    assert saved["VIT"]["STRIDED"] == {"STRIDE": 3} and saved["IMPORTS"] == [path]
    log = (strided / "stdout.log").read_text()
    assert f"`slowfast-lara predict --import {path} {strided} VIDEO`" in log
    assert yaml.safe_load((strided / "config.yaml").read_text())["IMPORTS"] == [path]
    assert json.loads((strided / "test_results.json").read_text())["num_videos"] == 7
    video = video_set / "test0.mp4"
    for words in (
        ["predict", strided, video],
        ["swap", strided, "--attentions", "strided", "--landmarks", "2", "--views", "1"],
        ["export", strided, tmp_path / "exported"],
        ["predict", tmp_path / "exported", video],
        ["run", "--cfg", strided / "config.yaml"],
    ):
        code, stdout, stderr = command(*words, "--import", path, folder=tmp_path)
        assert code == 0, (words, stderr)
        if words[0] == "swap":  # this attention has no landmarks: one row, and no number in it
            rows = [line.split()[:2] for line in stdout.splitlines() if "strided" in line]
            assert rows[-1][0] == "strided" and "." in rows[-1][1], stdout
        code, _, stderr = command(*words[:1], *words[1:], folder=tmp_path)
        assert code == 2 and len(stderr.splitlines()) == 1, (words, stderr)
        if words[0] != "export":
            assert f"--import {path}" in stderr and "strided" in stderr


def test_a_missing_import_is_named_and_nothing_is_imported(strided, recipes, tmp_path):
    """A checkpoint imports no code: neither the recorded file nor one in the working directory."""
    path = tmp_path / "model.pyth"
    content = load_checkpoint(strided, LAST)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'victim')!r}, 'w')")
    for record in ([str(evil)], ["evil"], "evil.py", {"a": 1}, [3]):
        tree = {**yaml.safe_load(content["cfg"]), "IMPORTS": record}
        torch.save({**content, "cfg": yaml.safe_dump(tree)}, path)
        name = record[0] if isinstance(record, list) else record
        with pytest.raises(
            ConfigError, match=f"strided.*--import {re.escape(str(name))}"
        ) as caught:
            load(path)
        assert "\n" not in str(caught.value) and VARIABLE in str(caught.value)
    assert not (tmp_path / "victim").exists()


def test_environment_variable_and_import_in_python(strided, recipes, video_set, monkeypatch):
    program = "import sys, slowfast_lara; print(slowfast_lara.load(sys.argv[1])(sys.argv[2]))"
    files = (strided, video_set / "test0.mp4")
    imports = f"import sys; sys.path.append({str(recipes)!r}); import my_attention; {program}"
    code, stdout, stderr = finish(start(*files, program=("-c", imports)))
    assert code == 0 and "%" in stdout, stderr
    monkeypatch.setenv(VARIABLE, os.pathsep.join(["my_dataset.py", "my_attention.py"]))
    code, stdout, stderr = finish(start(*files, program=("-c", program), folder=recipes))
    assert code == 0 and "%" in stdout, stderr


def test_a_run_that_does_not_use_its_import_needs_none(recipes, video_set, tmp_path):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", SOLVER__MAX_EPOCH=1)
    words = ["run", "--cfg", config, "--import", recipes / "my_attention.py"]
    assert command(*words)[0] == 0
    model = load(tmp_path / "out")
    assert "STRIDED" not in model.cfg.VIT and model.cfg.IMPORTS == []


def write_json_lists(folder: Path, video_set: Path) -> Path:
    folder.mkdir()
    for split in ("train", "val", "test"):
        lines = (video_set / f"{split}.csv").read_text().split("\n")[:-1]
        labels = {path: int(label) for path, label in map(str.split, lines)}
        (folder / f"{split}.json").write_text(json.dumps(labels))
    return folder


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_recipe_of_a_dataset_in_loader_workers(recipes, video_set, tmp_path, method):
    """A worker that is spawned imports the module of the dataset by its name."""
    lists = write_json_lists(tmp_path / "lists", video_set)
    names = {"TRAIN": {"DATASET": "JsonVideos"}, "TEST": {"DATASET": "JsonVideos"}}
    config = write_config(tmp_path / "c.yaml", lists, tmp_path / "out", DATA_LOADER__NUM_WORKERS=1)
    tree = yaml.safe_load(config.read_text())
    for part, values in names.items():
        tree[part].update(values)
    config.write_text(yaml.safe_dump({**tree, "SOLVER": {**tree["SOLVER"], "MAX_EPOCH": 1}}))
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys\nfrom slowfast_lara.cli import main\n"
        f"if __name__ == '__main__':\n    multiprocessing.set_start_method({method!r})\n"
        "    sys.exit(main(['run', *sys.argv[1:]]))\n"
    )
    words = ["--cfg", config, "--import", recipes / "my_dataset.py"]
    code, stdout, stderr = finish(start(*words, program=(str(script),)))
    assert code == 0, stdout + stderr
    assert json.loads((tmp_path / "out" / "test_results.json").read_text())["num_videos"] == 7
    with pytest.raises(ConfigError, match="TRAIN.DATASET is 'JsonVideos'.*--import .*my_dataset"):
        load(tmp_path / "out")


@pytest.mark.slow
def test_recipe_of_a_choice_of_frames_in_spawned_ranks(recipes, video_set, tmp_path, monkeypatch):
    """Attention and dataset reach the ranks that the launcher spawns, also as a relative path."""
    changes = {
        "TRAIN__DATASET": "SpreadVideos",
        "TEST__DATASET": "spreadvideos",
        "VIT__APPROX_ATTN_TYPE": "strided",
        "SOLVER__MAX_EPOCH": 1,
        "NUM_SHARDS": 2,
    }
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", **changes)
    shutil.copy(recipes / "my_frames.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    names = ["my_frames.py", str(recipes / "my_attention.py")]
    monkeypatch.setenv(VARIABLE, os.pathsep.join(names))
    code, stdout, stderr = finish(start_spawning(tmp_path, config))
    assert code == 0, stdout + stderr
    results = json.loads((tmp_path / "out" / "test_results.json").read_text())
    assert results["num_videos"] == 7
    monkeypatch.delenv(VARIABLE)
    words = ["--import", "my_frames.py", "--import", names[1], "--stream"]
    code, stdout, stderr = command("predict", "out", video_set / "test0.mp4", *words)
    assert code == 0, stderr


def test_nodes_with_different_imported_code_are_refused(recipes, video_set, tmp_path):
    config = write_config(tmp_path / "c.yaml", video_set, tmp_path / "out", TRAIN__BATCH_SIZE=2)
    port, nodes = free_port(), []
    for node in range(2):
        folder = tmp_path / str(node)
        shutil.copytree(recipes, folder)
        with (folder / "my_attention.py").open("a") as file:
            file.write(f"# node {node}\n")
        words = (config, node, port, *STRIDED, "--import", "my_attention.py")
        nodes.append(start_node(*words, folder=folder))
    ends = [finish(node) for node in nodes]
    assert [end[0] for end in ends] != [0, 0]
    assert "the imported my_attention" in "".join(end[2] for end in ends)


BROKEN = {
    "missing.py": (None, "no such file"),
    "syntax.py": ("def f(:\n", "SyntaxError"),
    "name.py": ("\nundefined\n", "line 2"),
    "exits.py": ("import sys; sys.exit(3)", "SystemExit"),
    "json.py": ("", "another module is named json; rename"),
    "taken.py": (
        "from slowfast_lara.attention import Estimator, register\n"
        "@register('lara')\nclass Mine(Estimator): pass\n",
        "already registered",
    ),
    "no_default.py": (
        "from slowfast_lara.attention import Estimator, register\n@register('mine')\n"
        "class Mine(Estimator):\n    def __init__(self, *, scale): pass\n",
        "option scale of mine has no default",
    ),
    "no_such_module": (None, "no module 'no_such_module'.*end with .py"),
    "./needs.py": ("import no_such_module", "no_such_module.*line 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_import_that_fails_is_one_line(name, tmp_path):
    text, message = BROKEN[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    code, stdout, stderr = command("configs", "--import", name, folder=tmp_path)
    assert (code, stdout) == (2, "") and len(stderr.splitlines()) == 1, stderr
    assert re.search(message, stderr) and name.removeprefix("./") in stderr


def test_files_next_to_the_import_do_not_shadow_other_modules(tmp_path):
    (tmp_path / "mine.py").write_text("import wave, neighbour; wave.open")
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "wave.py").write_text("raise ImportError('shadows a module of Python')")
    code, _, stderr = command("configs", "--import", tmp_path / "mine.py")
    assert code == 0, stderr


@pytest.mark.parametrize("words", BAD_FILES, ids=" ".join)
def test_every_command_has_the_flag(words, capsys, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    if "--crops" in words:
        words = ["benchmark", "gpu"]
    assert code_of([*words, "--import", "none.py"], main) == 2
    assert "none.py: no such file" in only_error(capsys)


def test_unknown_attention_suggests_the_flag():
    with pytest.raises(ConfigError, match="VIT.APPROX_ATTN_TYPE is 'strided'.*--import"):
        load_config("quick/lara", {"VIT.APPROX_ATTN_TYPE": "strided"})
    with pytest.raises(ConfigError, match="unknown config key VIT.STRIDED; --import") as caught:
        load_config("quick/lara", {"VIT.STRIDED.STRIDE": 2})
    assert "did you mean" not in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean VIT.LARA"):
        load_config("quick/lara", {"VIT.LARRA.BETA": 2.0})


@pytest.mark.parametrize("text", ["", "VIT:\n  DEPTH: 2\n"])
def test_a_config_file_with_imports_and_few_other_keys(text, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"IMPORTS: [mine.py]\nDATA:\n  NUM_FRAMES: 16\n{text}")
    assert load_config(str(path)).IMPORTS == []
