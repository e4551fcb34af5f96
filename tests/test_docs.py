"""Documentation: links, Python blocks, config keys and line lengths of the Markdown files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import slowfast_lara
from slowfast_lara.config import get_cfg

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "results/*.md", "examples/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
)
WRITTEN_BY_HAND = {"README.md", "details.md"}
# Written by docs/config_reference.py and by the studies.
GENERATED = {ROOT / "docs" / "config.md"} | {
    path for path in (ROOT / "results").glob("*.md") if path.name not in WRITTEN_BY_HAND
}
# Names keys of PySlowFast's git head, which are not in our config.
OTHER_KEYS = {ROOT / "docs" / "pyslowfast.md"}
KEY = re.compile(
    r"\b(?:DATA|DATA_LOADER|MIXUP|MODEL|SOLVER|TENSORBOARD|TEST|TRAIN|VIT)(?:\.[A-Z][A-Z_]+)+\b"
)


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r'(?:\]\(|src=")([^)\s"#:]+)[)#"]', text)
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_compile(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        compile(block, page.name, "exec")


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
