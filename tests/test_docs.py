"""Documentation: links, Python blocks, config keys and line lengths of the Markdown files."""

from __future__ import annotations

import ast
import builtins
import inspect
import pkgutil
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks.__main__
import slowfast_lara
import studies.__main__
from slowfast_lara import cli
from slowfast_lara.config import get_cfg
from slowfast_lara.config.shipped import find_config

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("*.md", "docs/*.md", "results/*.md", "*/README.md", "slowfast_lara/*/README.md")
PAGES = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
WRITTEN_BY_HAND = {"README.md", "details.md"}
# Written by docs/config_reference.py and by the studies.
GENERATED = {ROOT / "docs" / "config.md"} | {
    path for path in (ROOT / "results").glob("*.md") if path.name not in WRITTEN_BY_HAND
}
# Name keys of PySlowFast's git head, and of an attention that the page defines.
OTHER_KEYS = {ROOT / "docs" / "pyslowfast.md", ROOT / "docs" / "extend.md"}
PROGRAMS = {
    "slowfast-lara": cli,
    "slowfast_lara.cli": cli,
    "benchmarks": benchmarks.__main__,
    "studies": studies.__main__,
}
KEY = re.compile(
    r"\b(?:DATA|DATA_LOADER|EPICKITCHENS|MIXUP|MODEL|SOLVER|TENSORBOARD|TEST|TRAIN|VIT|WANDB)"
    r"(?:\.[A-Z][A-Z_]+)+\b"
)


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r'(?:\]\(|src=")([^)\s"#:]+)[)#"]', text)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def test_readme_lists_all_pages():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [page_id(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    assert [page for page in pages if f"]({page})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_compile(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_define_their_names(page):
    """A name is defined by the block or by an earlier block of the page."""
    defined = set(dir(builtins))
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        tree = ast.walk(ast.parse(block))
        used = set()
        for node in tree:
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                defined.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = (alias.asname or alias.name for alias in node.names)
                defined |= {name.partition(".")[0] for name in names}
        assert used <= defined, block


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_use_names_that_the_package_has(page):
    """What they import from the package, and attributes of the imported modules."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        imported: dict[str, object] = {}
        for node in ast.walk(ast.parse(block)):
            source = ast.unparse(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "slowfast_lara" in source:
                exec(source, imported)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = imported.get(node.value.id)
                assert not isinstance(module, ModuleType) or hasattr(module, node.attr), block


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The commands of the package in a page's shell blocks: program and arguments."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r" && | \| |; ", line):
                words = shlex.split(command, comments=True)
                for program in {*PROGRAMS} & {*words}:
                    yield program, words[words.index(program) + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_shell_blocks_use_subcommands_flags_and_configs_that_exist(page, capsys):
    for program, words in commands(page):
        parser = PROGRAMS[program].build_parser()
        while words and words[0] in parser.subcommands:
            parser = parser.subcommands[words.pop(0)]
        assert parser.handler, (program, words)
        try:
            args = vars(parser.parse_arguments(words))
        except SystemExit:
            pytest.fail(f"{parser.prog} {' '.join(words)}: {capsys.readouterr().err}")
        cfg = args.get("cfg") or "CONFIG"
        if not cfg.isupper() and not cfg.endswith(".yaml"):  # CONFIG is a placeholder
            find_config(cfg)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_installs_from_the_checkout_are_editable(page):
    """A copy of the package would not follow later edits of the checkout."""
    text = page.read_text(encoding="utf-8")
    installs = re.findall(r"pip install.* '?\.(?=[`'[\s]).*", text)
    assert [line for line in installs if " -e " not in line] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_example_runs_are_made_before_they_are_used(page):
    """By a command above on the page, or by a section that the page links before."""
    text = page.read_text(encoding="utf-8")
    made = {"runs/exact": "OUTPUT_DIR runs/exact", "runs/set": "data synthetic runs/set"}
    section = text.find("[A first model](get-started.md#a-first-model-step-by-step)")
    for name, command in made.items():
        first = [at for at in (section, text.find(command)) if at >= 0]
        uses = [match.start() for match in re.finditer(name, text)]
        # The link may follow in the same sentence.
        assert not uses or (first and min(first) <= uses[0] + 200)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_shell_blocks_use_targets_of_make_that_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        used = re.findall(r"^make ((?:[\w-]+ ?)+)", block, re.MULTILINE)
        assert {target for words in used for target in words.split()} <= {*targets}, block


def test_docstrings_of_the_api_page_name_parameters():
    """One per line: `make docs` refuses others."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for path in re.findall(r"^::: (\S+)", page, re.MULTILINE):
        documented = pkgutil.resolve_name(path)
        sections = re.split(r"^(\w+):$", inspect.getdoc(documented) or "", flags=re.MULTILINE)
        if "Args" in sections:
            lines = sections[sections.index("Args") + 1]
            names = re.findall(r"^    (\S[^:]*):", lines, re.MULTILINE)
            assert names and set(names) <= set(inspect.signature(documented).parameters), path


def test_weights_have_an_address():
    known = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    configs = (path for path in (ROOT / "configs").rglob("*.yaml"))
    for page in [*PAGES, *configs]:
        for name in re.findall(r"weights/(\w[\w.-]*\.(?:pth|pyth|npz))", page.read_text("utf-8")):
            assert name in known, (page, name)


def test_make_replaces_a_copy_of_the_package(tmp_path):
    """After `pip install .` in the environment of make, without -e."""
    for name in ("Makefile", "setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages" / "slowfast_lara"
    package.mkdir(parents=True)
    (tmp_path / ".venv" / "installed").touch()

    def planned() -> str:
        command = ["make", "-n", "quickstart"]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert "pip install" not in planned()
    (package / "__init__.py").touch()
    assert re.search(r"pip install .* -e \.", planned())


@pytest.mark.parametrize("page", sorted(set(PAGES) - OTHER_KEYS), ids=page_id)
def test_config_keys_exist(page):
    unknown = []
    for key in sorted(set(KEY.findall(page.read_text(encoding="utf-8")))):
        node = get_cfg()
        for name in key.split("."):
            if name not in node:
                unknown.append(key)
                break
            node = node[name]
    assert unknown == []


@pytest.mark.parametrize("page", sorted(set(PAGES) - GENERATED), ids=page_id)
def test_lines_fit_a_diff(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    too_long = [
        number
        for number, line in enumerate(lines, 1)
        if len(line) > 300 and not line.startswith("|")
    ]
    assert too_long == []


def test_readme_is_short_and_names_the_two_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    assert "make quickstart" in readme and "make test" in readme


def test_versions_agree():
    version = slowfast_lara.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    assert f"\n## {version}\n" in changelog


@pytest.mark.parametrize("page", ["README.md", "docs/look-inside.md", "docs/choose-attention.md"])
def test_captions_of_attention_figures_say_how_lara_does(page):
    """A reader must not have to find out from the curves that LARA is not the best."""
    text = (ROOT / page).read_text(encoding="utf-8")
    markdown, html = r"!\[(.*?)\]\(images/(?:approx|traj)", r"trajectories.png.*?alt=\"(.*?)\""
    captions = re.findall(f"{markdown}|{html}", text)
    assert captions
    for caption in map("".join, captions):
        assert "LARA" in caption and "Nyström" in caption
