"""A sweep's log as a page, build/architectures.md; docs/compatibility.md has its summary."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from tests.system.architectures.catalogue import ARCHITECTURES
from tests.system.architectures.running import LOOKS_FOR_UNUSED, Way, ways_of
from tests.system.campaigns.sweep import Log
from tests.system.training.outcomes import (
    AS_UNSPLIT,
    EQUAL,
    EQUAL_TO_UNSPLIT,
    NOT_ASKED,
    OUTCOMES,
    RAISES,
    REFUSED,
    REFUSED_UNSPLIT,
    ROUNDED,
    Finding,
)

DOCUMENT = Path(__file__).parents[3] / "build" / "architectures.md"

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
differ, the unsplit compile decides, as in the fuzz. Caps are chosen so that there are about six
buckets. torch is {torch}, the inner compiler `aot_eager`. {done} of {all} runs are done.

- *whole* is `torch.compile(ddp)`, *regional* `layer.compile()` on each repeated layer before DDP is
  made. *Checkpointed* is the model's own: `gradient_checkpointing_enable()` in transformers,
  `set_grad_checkpointing()` in timm. Models that have none have no such rows.
- *5+1/5*: bitwise equal to eager DDP, with one graph in five sections and one whole, for the
  Reducer's five buckets. *rounded 5/5*: equal within 1e-4 of the largest element. *as unsplit 5/5*:
  not what eager gives, but what the unsplit compile gives.
- *looks for unused*: some parameters get no gradient, so DDP has `find_unused_parameters=True`.

"""

_SUMMARY = """\
| outcome | forward | backward | in-tree |
|---|---:|---:|---:|
"""

_TABLE = """\
| architecture | compiled | forward | backward | in-tree |
|---|---|---|---|---|
"""

_ON_INDUCTOR = "Whole, without any option (default) and with the backward split."

_TABLE_ON_INDUCTOR = """\
| architecture | default | backward |
|---|---|---|
"""

_COLUMNS = ("forward", "backward", "in-tree")


def write_document(log: Log) -> None:
    """Write the page: what was compared, the summary, and a row for each way that was run."""
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(text_of(log))


def text_of(log: Log) -> str:
    """Return the page; a cell that is empty has not been run."""
    names = [name for name in ARCHITECTURES if any(name == other for other, _ in log.findings)]
    packages = {name: metadata.version(name) for name in ("transformers", "timm")}
    runs = [(name, str(way)) in log.findings for name in ARCHITECTURES for way in ways_of(name)]
    text = _INTRODUCTION.format(
        number=len(names), done=sum(runs), all=len(runs), torch=torch.__version__, **packages
    )
    text += _SUMMARY + "".join(_summary(log)) + "\n## All rows\n\n" + _TABLE
    text += "".join(line for name in names for line in _rows(log, name))
    text += f"\n## On Inductor\n\n{_ON_INDUCTOR}\n\n{_TABLE_ON_INDUCTOR}"
    return text + "".join(line for name in names for line in _on_inductor(log, name))


def _summary(log: Log) -> Iterator[str]:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for name in ARCHITECTURES:
        for way in ways_of(name):
            finding = log.findings.get((name, str(way)))
            if finding is not None and way.inner == "aot_eager":
                counts[finding.outcome, way.optimizer] += 1
    for outcome in OUTCOMES:
        numbers = [counts[outcome, column] for column in _COLUMNS]
        if any(numbers) and outcome != NOT_ASKED:
            yield f"| {outcome} | {' | '.join(map(str, numbers))} |\n"


def _rows(log: Log, name: str) -> Iterator[str]:
    title = name
    for is_checkpointed in (False, True):
        for is_regional in (False, True):
            ways = [
                Way(optimizer=column, is_regional=is_regional, is_checkpointed=is_checkpointed)
                for column in _COLUMNS
            ]
            results = [log.findings.get((name, str(way))) for way in ways]
            if not any(result and result.outcome != NOT_ASKED for result in results):
                continue
            if any(result and LOOKS_FOR_UNUSED in result.remarks for result in results):
                title = f"{title}, {LOOKS_FOR_UNUSED}" if title else title
            how = ("regional" if is_regional else "whole") + ", checkpointed" * is_checkpointed
            yield f"| {title} | {how} | {' | '.join(map(_cell, results))} |\n"
            title = ""


def _on_inductor(log: Log, name: str) -> Iterator[str]:
    ways = [Way(optimizer=o, inner="inductor") for o in ("default", "backward")]
    results = [log.findings.get((name, str(way))) for way in ways]
    if any(results):
        yield f"| {name} | {' | '.join(map(_cell, results))} |\n"


def _cell(result: Finding | None) -> str:
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
