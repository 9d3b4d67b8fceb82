"""What mkdocs does besides rendering the pages in docs/.

It takes files from elsewhere in the repository into the site, under the paths that they have there,
and corrects the links between those and the pages. A line that is a link to code, which a reader of
the repository can follow, becomes that code: a part of a program of examples/recipes, the reference
of a name, or the commands' help (`<!-- generated: commands -->`).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import command_line
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BORROWED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/*.md",
    "benchmarks/images/*",
    "docs/figures/*.py",
    "examples/*.py",
    "examples/recipes/*.py",
)
GENERATED = {"commands": command_line.render}

_MARKER = re.compile(r"^\[.*\]\(.*\) <!-- generated: (\w+) -->$", re.MULTILINE)
_RECIPE = re.compile(r"^\[(examples/recipes/\w+\.py)\]\(.*\)$", re.MULTILINE)
_NAME = re.compile(r"^- \[(ddpopt\.[\w.]+)\]\(.*\)$", re.MULTILINE)
_INDENTED_COMMAND = re.compile(r"^    python (?:.*\n)(?:    .*\n)*", re.MULTILINE)


class _Stricter(logging.Filter):
    """Makes a link to a file that is not in the site a warning, so that `--strict` fails.

    mkdocs warns of files that do not exist, and only tells of those that `exclude_docs` names.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if "excluded from the built site" in record.getMessage():
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


logging.getLogger("mkdocs.structure.pages").addFilter(_Stricter())


def on_files(files: Files, *, config: Any) -> Files:
    """Add the borrowed files."""
    for pattern in BORROWED:
        for path in sorted(ROOT.glob(pattern)):
            uri = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Correct the links, and fill in the code."""
    markdown = _RECIPE.sub(r'```python title="\1"\n--8<-- "\1:recipe"\n```', markdown)
    markdown = _NAME.sub(_refer, markdown)
    markdown = relink(markdown, page.file.src_uri)
    return _MARKER.sub(lambda found: GENERATED[found[1]](), markdown)


def _refer(found: re.Match[str]) -> str:
    """Return mkdocstrings' directive for a name; of settings, what is one."""
    options = '\n    options: {filters: ["!^_", "!^check_", "!^[A-Z]+$"]}'
    return f"::: {found[1]}{options if found[1] == 'ddpopt.config' else ''}\n"


def relink(markdown: str, uri: str) -> str:
    """Return a page of the repository with links as they are in the site.

    In the repository the pages are in docs/, in the site they are at its top, beside the folders
    that are borrowed.
    """
    if uri in ("CHANGELOG.md", "CONTRIBUTING.md"):
        return markdown.replace("](docs/", "](")
    if uri.startswith("benchmarks/"):
        markdown = _INDENTED_COMMAND.sub(_fence, markdown)
        return markdown.replace("](../docs/", "](../")
    return markdown.replace("](../", "](")


def _fence(found: re.Match[str]) -> str:
    """Return an indented command as a fenced one: after a list, Markdown takes it for an item."""
    lines = [line.removeprefix("    ") for line in found[0].splitlines()]
    return "\n".join(["```sh", *lines, "```", ""])
