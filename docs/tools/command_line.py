"""The reference of the command line, made from its parser."""

from __future__ import annotations

import argparse
import html
import os
from collections.abc import Iterator
from unittest import mock

from ddpopt.cli.main import make_parser


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Return each command that does something, with its parser, in the order of the help."""
    return _leaves("ddpopt", make_parser())


def render() -> str:
    """Return a section for each command, with its help."""
    parts = []
    for name, parser in commands():
        with mock.patch.dict(os.environ, {"COLUMNS": "78", "NO_COLOR": "1"}):
            text = parser.format_help()
        parts.append(f"## {name}\n\n<pre><code>{html.escape(text, quote=False)}</code></pre>\n")
    return "\n".join(parts)


def _leaves(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, child in action.choices.items():
            yield from _leaves(f"{name} {word}", child)
