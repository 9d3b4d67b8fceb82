"""Each promise of four pages names the tests that prove it, or says why none does.

A promise is a bullet, or a row of a table. Its mark is a comment at its end, which no reader sees:

    <!-- proved by: tests/split/test_order.py::test_name, tests/test_backend.py::test_other -->
    <!-- not proved: why no test does -->

A mark right below a heading is that of all bullets and rows until the next heading.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.documents import DOCS, ROOT

_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ .*\n", re.MULTILINE)
# The first two lines of a table, which are no promise.
_TITLES = re.compile(r"^\|.*\|\n\|[-:|]+\|$", re.MULTILINE)
# A row, or a bullet with the lines that go on with it.
_PROMISE = re.compile(r"^\|.*\|$|^- .*(?:\n  .*)*", re.MULTILINE)
_MARK = re.compile(r"<!-- (proved by|not proved):\s+(\S.*?)\s+-->", re.DOTALL)


def _unmarked(text: str) -> Iterator[str]:
    for section in _HEADING.split(_BLOCK.sub("", text)):
        if not _MARK.match(section.lstrip()):
            for promise in _PROMISE.findall(_TITLES.sub("", section)):
                if not _MARK.search(promise):
                    yield promise


@functools.cache
def _tests_in(path: str) -> set[str]:
    """The names of a file's tests, of those in a class as `Class::method`."""
    body = ast.parse((ROOT / path).read_text()).body
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for kind in (node for node in body if isinstance(node, ast.ClassDef)):
        names |= {f"{kind.name}::{n.name}" for n in kind.body if isinstance(n, ast.FunctionDef)}
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.quick("algorithms")
@pytest.mark.parametrize("page", ["algorithms", "compatibility", "limits", "splits"])
def test_each_promise_is_marked_with_tests_that_there_are(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    assert [*_unmarked(text)] == []
    for _, names in (mark for mark in _MARK.findall(text) if mark[0] == "proved by"):
        for path, _, name in (test.partition("::") for test in re.split(r",\s+", names)):
            assert name in _tests_in(path), f"{path} has no test {name}"
