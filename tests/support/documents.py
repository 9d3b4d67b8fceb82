"""Finds every command and code block in the project's documents, and runs commands as written.

Commands are the lines of shell blocks in pages, and paragraphs of commands in docstrings. What no
test runs is marked. In a page, a comment in front of the block:

    <!-- test: skip, the reason -->
    <!-- test: skip `the command`, the reason -->
    <!-- test: compile only, the reason -->
    <!-- test: run on two emulated nodes -->

In a Python file, a line below the docstring: `# test: skip, the reason`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("*.md")),
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
]
# What programs that end are watched by; see there.
_ENDINGS = str(ROOT / "tests" / "system" / "endings")
_SHELL = r"(?:[A-Z_]+=\S* )*(?:sudo )?(?:ddpopt|export|git|make|pip|python|source|torchrun)(?=\s|$)"
_MARK = re.compile(r"\s*<!-- test: (.*) -->")
_SKIPPED = re.compile(r"skip `(.+)`, (.+)")


class Block(NamedTuple):
    """A fenced block. `how` is what a comment in front of it says of all of it.

    `skipped` are the commands of it that no test runs.
    """

    page: str
    line: int
    language: str
    title: str
    how: str
    skipped: tuple[str, ...]
    text: str

    @property
    def commands(self) -> list[str]:
        """The shell's lines: after `$ ` in a console, all in a script; comments left out."""
        text = self.text
        if self.language == "console":
            lines = [line for line in text.splitlines() if line.startswith("$ ")]
            text = "\n".join(line[2:] for line in lines)
        return _commands_in(text)

    @property
    def is_shell(self) -> bool:
        """True if the block is named so, or has no name and only commands."""
        if self.language:
            return self.language in ("bash", "console", "sh")
        return all(map(is_command, self.commands))


def is_command(line: str) -> bool:
    """Return whether a line begins as commands do."""
    return re.match(_SHELL, line) is not None


def _commands_in(text: str) -> list[str]:
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    commands = [line.partition("  #")[0].strip() for line in lines]
    return [command for command in commands if command and not command.startswith("#")]


def blocks(page: str) -> list[Block]:
    """Return a page's blocks."""
    lines = (ROOT / page).read_text().splitlines()
    found: list[Block] = []
    marks: list[str] = []
    start = None
    for number, line in enumerate(lines):
        if start is None:
            if mark := _MARK.fullmatch(line):
                marks.append(mark[1])
            elif fence := re.fullmatch(r"( *)```(\w*)(.*)", line):
                start, indent, language = number, fence[1], fence[2]
                title = re.search(r'title="(.*?)"', fence[3])
            elif line.strip():
                marks = []
        elif line == f"{indent}```":
            text = "\n".join(text.removeprefix(indent) for text in lines[start + 1 : number])
            name = title[1] if title else ""
            skipped = tuple(m[1] for m in map(_SKIPPED.fullmatch, marks) if m)
            how = ", ".join(mark for mark in marks if not _SKIPPED.fullmatch(mark))
            found.append(Block(page, start + 1, language, name, how, skipped, text + "\n"))
            start, marks = None, []
    assert start is None, f"{page}: the block of line {start} does not end"
    return found


class Command(NamedTuple):
    """A command of a document, and whether a mark says why no test runs it."""

    place: str
    text: str
    is_skipped: bool


def commands() -> Iterator[Command]:
    """Give every command of pages and of docstrings."""
    for page in PAGES:
        for block in (block for block in blocks(page) if block.is_shell):
            for text in block.commands:
                is_skipped = block.how.startswith("skip, ") or text in block.skipped
                yield Command(f"{page}:{block.line}", text, is_skipped)
    for folder in ("benchmarks", "docs", "examples", "src", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from _docstring_commands(path)


def _docstring_commands(path: Path) -> Iterator[Command]:
    source = path.read_text()
    is_skipped = re.search(r"^# test: skip, .+", source, re.MULTILINE) is not None
    for paragraph in re.split(r"\n\s*\n", ast.get_docstring(ast.parse(source)) or ""):
        found = _commands_in(paragraph.removeprefix("Run it with: "))
        if all(map(is_command, found)):
            for command in found:
                yield Command(path.relative_to(ROOT).as_posix(), command, is_skipped)


def command_of(program: str) -> str:
    """Return the command by which a program's docstring says to run it."""
    (command,) = _docstring_commands(ROOT / program)
    return command.text


def environment(**variables: str) -> dict[str, str]:
    """Return what programs of this Python run in, one thread each, watched as they end."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    modules = os.pathsep.join([_ENDINGS, *map(os.path.abspath, folders)])
    defaults = {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": modules}
    return {**os.environ, **defaults, **variables}


def split_variables(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command sets in front, and its words."""
    words = shlex.split(command)
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


def run_command(command: str, folder: Path = ROOT, **more: str) -> str:
    """Run a command as it is written; return what it prints."""
    variables, words = split_variables(command)
    return run_program(*words, folder=folder, **variables, **more)


def run_python(*arguments: str, **variables: str) -> str:
    """Run this Python with some arguments; return what it prints."""
    return run_program(sys.executable, *arguments, **variables)


def run_program(*words: str, folder: Path = ROOT, **variables: str) -> str:
    """Run a program to its end, which is to be a good one; return what it prints."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout
