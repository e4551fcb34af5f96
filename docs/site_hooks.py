"""MkDocs hooks: put pages from outside docs/ on the site and translate the links between them.

Links in the Markdown files are paths in the repository, so that they also work in a checkout and
on a code host. `on_page_markdown` translates them into paths on the site. A link to a file that
is not on the site stays as it is; MkDocs then reports it, and `--strict` fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Pages from outside docs/: path in the repository -> path on the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "configs/README.md": "configs.md",
    "datasets/README.md": "data.md",
    "examples/README.md": "examples.md",
    "slowfast_lara/attention/README.md": "estimators.md",
}
LINK = re.compile(r'(?P<before>\]\(|src=")(?P<path>[^)\s"#]+)(?P<anchor>#[^)\s"]*)?(?=[)"])')


def on_files(files: Any, config: Any) -> Any:
    results = {
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "results").rglob("*"))
        if path.is_file()
    }
    for source, uri in {**PAGES, **results}.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def translate(match: re.Match[str]) -> str:
        if ":" in match["path"]:  # https:, mailto:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        uri = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(uri) is None:
            return match[0]
        relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return match["before"] + relative + (match["anchor"] or "")

    return LINK.sub(translate, markdown)
