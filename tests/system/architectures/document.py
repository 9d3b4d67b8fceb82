"""docs/architectures.md and the pages with its rows, from a sweep's log."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from tests.system.architectures.catalogue import ARCHITECTURES
from tests.system.architectures.log import Log
from tests.system.architectures.running import NO_CHECKPOINTING, Result, Way, ways_of
from tests.system.fuzzing.checking import (
    AS_UNSPLIT,
    EQUAL,
    EQUAL_TO_UNSPLIT,
    OUTCOMES,
    RAISES,
    REFUSED,
    REFUSED_UNSPLIT,
    ROUNDED,
)

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT = DOCS / "architectures.md"
_ROWS = "architectures-{}.md"  # as many as it takes; mkdocs.yml leaves them out of the menu
_MAX_WORDS = 1400  # of a page, less its heading; tests/system/test_docs.py allows 1,500 in all

_WORDS = {
    EQUAL: "equal",
    EQUAL_TO_UNSPLIT: "rounded",
    ROUNDED: "rounded",
    AS_UNSPLIT: "as unsplit",
    REFUSED: "eager raises",
    REFUSED_UNSPLIT: "unsplit raises",
}

_INTRODUCTION = """\
# Architectures

{number} architectures from transformers {transformers} and timm {timm}, tiny and with random
weights, each trained for three steps on two gloo ranks with different data on each. Losses, each
step's gradients, parameters and buffers are compared with eager DDP, bit for bit; where they
differ, the unsplit compile decides, as in [the fuzz](fuzzing.md#random-models). Caps are chosen
so that there are about six buckets. `tests/system/test_architectures.py` runs a handful. This
page and those with the rows are written by

<!-- test: skip, it takes hours; tests/system/test_architectures.py runs a handful -->
```
python -m tests.system.architectures --log architectures.jsonl --document
```

which takes several hours, can be resumed, and needs `pip install transformers timm`; here with
torch {torch} and the inner compiler `aot_eager`. {done} of {all} runs are done.

- *whole* is `torch.compile(ddp)`, *regional* `layer.compile()` on each repeated layer before DDP is
  made. *Checkpointed* is the model's own: `gradient_checkpointing_enable()` in transformers,
  `set_grad_checkpointing()` in timm. Models that have none have no such rows.
- *5+1/5*: bitwise equal to eager DDP, with one graph in five sections and one whole, for the
  Reducer's five buckets. *rounded 5/5*: equal within 1e-4 of the largest element. *as unsplit 5/5*:
  not what eager gives, but what the unsplit compile gives.
- *looks for unused*: some parameters get no gradient, so DDP has `find_unused_parameters=True`.

"""

# Written by hand, from what the log says; to be renewed with the tables.
_CAUSES = {
    "*rounded* in the forward split": "a value that several sections use gets its gradients "
    "added in another order, as with the in-tree optimizer",
    "timm's models with batch norm, whole and checkpointed: *as unsplit*": "eager computes the "
    "forward again, which counts each batch twice in the running statistics; compiled it counts "
    "once",
    "big_bird, whole, forward split: *as unsplit*": "its pooler gets zeros where eager has None: "
    "AOTAutograd makes them for outputs that nothing uses; the backward split leaves None",
    "reformer: *eager raises*": "its reversible layers run a backward of their own, in which a "
    "parameter is ready twice; DDP refuses that",
    "qwen3_next: *unsplit raises*": "the backward that AOTAutograd makes views a tensor whose "
    "strides do not allow it (torch 2.13)",
    "swin, regional, in-tree: *error*": "a symbolic size that tracing found to be a number crosses "
    "a cut; ddpopt writes the number in its place",
    "image classifiers of transformers: `5+5/5`": "the first step writes `problem_type` into "
    "the configuration, and Dynamo compiles anew, with any backend",
}

_SUMMARY = """\
| outcome | forward | backward | in-tree |
|---|---:|---:|---:|
"""

_TABLE = """\
| architecture | compiled | forward | backward | in-tree |
|---|---|---|---|---|
"""

_LEGEND = """\
[Architectures](architectures.md) says what is compared and what the cells mean. What is empty has
not been run."""

_ON_INDUCTOR = "Whole, without any option (default) and with the backward split.\n\n"

_TABLE_ON_INDUCTOR = """\
| architecture | default | backward |
|---|---|---|
"""

_COLUMNS = ("forward", "backward", "in-tree")


def write_document(log: Log) -> None:
    """Write the page, and those with the rows."""
    names = [name for name in ARCHITECTURES if any(name == other for other, _ in log.results)]
    packages = {name: metadata.version(name) for name in ("transformers", "timm")}
    runs = [(name, way) in log.results for name in ARCHITECTURES for way in ways_of(name)]
    text = _INTRODUCTION.format(
        number=len(names), done=sum(runs), all=len(runs), torch=torch.__version__, **packages
    )
    text += _SUMMARY + "".join(_summary(log))
    text += "\n## What is not equal, and why\n\n| row | cause |\n|---|---|\n"
    text += "".join(f"| {row} | {cause} |\n" for row, cause in _CAUSES.items())
    rows = {name: "".join(_rows(log, name)) for name in names}
    on_inductor = {name: "".join(_on_inductor(log, name)) for name in names}
    write_pages(text, rows, on_inductor)


def write_pages(text: str, rows: dict[str, str], on_inductor: dict[str, str]) -> None:
    """Write the page, whose text this is, and the rows, as many architectures a page as fit."""
    for path in DOCS.glob(_ROWS.format("*")):
        path.unlink()
    text += "\n## All rows\n\n"
    parts = [(_TABLE, part) for part in _parts(rows)]
    parts += [(_ON_INDUCTOR + _TABLE_ON_INDUCTOR, part) for part in _parts(on_inductor)]
    for number, (head, part) in enumerate(parts, start=1):
        kind = ", on Inductor" if head.startswith(_ON_INDUCTOR) else ""
        ends = dict.fromkeys([next(iter(part)), list(part)[-1]])
        title = f"Architectures{kind}: {' to '.join(ends)}"
        path = DOCS / _ROWS.format(number)
        text += f"- [{title}]({path.name})\n"
        path.write_text(f"# {title}\n\n{_LEGEND}\n\n{head}{''.join(part.values())}")
    DOCUMENT.write_text(text)


def _parts(rows: dict[str, str]) -> Iterator[dict[str, str]]:
    """Give all architectures that have rows, in parts of no more than _MAX_WORDS."""
    part: dict[str, str] = {}
    for name, lines in rows.items():
        if part and len(" ".join([*part.values(), lines]).split()) > _MAX_WORDS:
            yield part
            part = {}
        if lines:
            part[name] = lines
    if part:
        yield part


def _summary(log: Log) -> Iterator[str]:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for (name, way), result in log.results.items():
        if name in ARCHITECTURES and way.inner == "aot_eager":
            counts[result.outcome, way.optimizer] += 1
    for outcome in OUTCOMES:
        numbers = [counts[outcome, column] for column in _COLUMNS]
        if any(numbers):
            yield f"| {outcome} | {' | '.join(map(str, numbers))} |\n"


def _rows(log: Log, name: str) -> Iterator[str]:
    title = name
    for is_checkpointed in (False, True):
        for is_regional in (False, True):
            ways = [
                Way(optimizer=column, is_regional=is_regional, is_checkpointed=is_checkpointed)
                for column in _COLUMNS
            ]
            results = [log.results.get((name, way)) for way in ways]
            if not any(result and result.outcome != NO_CHECKPOINTING for result in results):
                continue
            if any(result and result.finds_unused for result in results):
                title = f"{title}, looks for unused" if title else title
            how = ("regional" if is_regional else "whole") + ", checkpointed" * is_checkpointed
            yield f"| {title} | {how} | {' | '.join(map(_cell, results))} |\n"
            title = ""


def _on_inductor(log: Log, name: str) -> Iterator[str]:
    ways = [Way(optimizer=o, inner="inductor") for o in ("default", "backward")]
    results = [log.results.get((name, way)) for way in ways]
    if any(results):
        yield f"| {name} | {' | '.join(map(_cell, results))} |\n"


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    if result.outcome not in _WORDS:
        word = "error" if result.outcome == RAISES else result.outcome
        return f"{word}: {_said(result.detail)[:100]}"
    word = _WORDS[result.outcome]
    if not result.sections:
        return word
    sections = f"{'+'.join(map(str, result.sections))}/{result.num_buckets}"
    return sections if result.outcome == EQUAL else f"{word} {sections}"


def _said(detail: str) -> str:
    """Return the line with the error of a traceback, or the last line."""
    lines = detail.strip().splitlines() or [""]
    found = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (found or lines)[-1].replace("|", "/")
