"""Write docs/compatibility.md: every row's outcome, ddpopt's beside the in-tree optimizer's.

python -m tests.system.compatibility
"""
# test: skip, it writes the page; tests/system/test_compatibility.py runs the rows

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.ranks import RankError, Ranks
from tests.system.scenarios.rows import ON_INDUCTOR, SCENARIOS
from tests.system.scenarios.running import Outcome, run_row

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"

COLUMNS = ("forward", "backward", "in-tree")

# Measured by hand, with `make drift`; renew it before a release.
_RELEASES = """\
## Releases of torch

The range is `torch>=2.11`, without an upper bound: a release that moved a private name costs
overlap and a warning, not the run. `make drift TORCH=torch==2.11.0` runs the core of the tests
on another release; `ddpopt doctor` says what one lacks. The table is of 2026-11-22, a run of pytest
for each file, by the name that the file had on that day, on a busy machine of two cores:

| tests | torch 2.11.0 | torch 2.15.0 |
|---|---|---|
| torch | 3 passed | 3 passed |
| backend | 25 passed | 25 passed |
| buckets | 6 passed | 6 passed |
| config | 15 passed | 15 passed |
| forward_split | 5 passed | 5 passed |
| gradients | 14 passed | 14 passed |
| sections | 13 passed | 13 passed |
| gates | 32 passed | 32 passed |
| dump | 22 passed | 22 passed |
| overlap | 17 passed | 17 passed |
| gated | 14 passed | 14 passed |
| exactness | 28 passed, 1 skipped | 29 passed |
| verification | 35 passed | 35 passed |
| warming | 21 passed | 21 passed |
| options | 16 passed | 16 passed |
| runner | 14 passed | 14 passed |
| data_parallel | 89 passed | 89 passed |
| attachment | 22 passed | 22 passed |
| agreement | 19 passed | 19 passed |
| cli, `-k doctor` | 4 passed | 4 passed |
| training | 168 passed | 168 passed |
| drift | 38 passed | 38 passed |

What was skipped: 2.11's DDP refuses fractional caps where parameters are delayed. CUDA builds run
`bf16_compress_hook` on gloo too, which the CPU build below refuses: equal. Private names: all
that `ddpopt doctor` lists were found in 2.11.0, 2.13.0 and 2.15.0.

## Models
"""

_INTRODUCTION = """\
# What works

{releases}
Each row trains a small model on two gloo processes, with different data on each, for at least
three steps, and compares losses, gradients, parameters and buffers with eager DDP. Gradients are
clipped in every row that has no sparse ones. The inner compiler is `aot_eager`, or Inductor where
a row says so. This file is written by `python -m tests.system.compatibility`, here with torch
{torch}; `tests/system/test_training.py` checks ddpopt's columns: *forward* and *backward* are its
two splits.
[Architectures](architectures.md) is the same for tiny models of transformers and timm.

- *3 of 3*: the graph was split into three sections, for three buckets of the Reducer. With graph
  breaks and recompiles there is one number of sections for each graph. *whole* is a graph that was
  not split; `explain` and a warning say why.
- The in-tree optimizer is PyTorch's own, with `backend="aot_eager"` or `"inductor"`. It refuses
  caps below its first bucket's, 1 MiB; for these models that is lowered to the row's cap. Its
  buckets may be others than ddpopt's: they are formed from the order in which gradients first
  arrive, and within one of its sections that is arbitrary, so it can have more of them.
- *not possible in eager DDP*: eager DDP raises this, and so does the compiled model.

| row | forward | backward | in-tree | note |
|---|---|---|---|---|
"""


def all_rows() -> list[tuple[str, str, str]]:
    """Return title, name and inner compiler of every row."""
    rows = [(name, name, "aot_eager") for name in SCENARIOS]
    return rows + [(f"{name}, Inductor", name, "inductor") for name in ON_INDUCTOR]


def documented_rows() -> list[str]:
    """Return the titles in the document."""
    lines = DOCUMENT.read_text().splitlines()
    table = lines[lines.index("|---|---|---|---|---|") + 1 :]
    return [line.split("|")[1].strip() for line in table]


def _lines() -> Iterator[str]:
    ranks = Ranks()
    try:
        for title, name, inner in all_rows():
            cells = [_run(ranks, name, optimizer, inner) for optimizer in COLUMNS]
            yield f"| {' | '.join([title, *cells, SCENARIOS[name]().note])} |"
    finally:
        ranks.stop()


def _run(ranks: Ranks, name: str, optimizer: str, inner: str) -> str:
    try:
        outcomes: list[Outcome] = ranks.run(run_row, name, optimizer, inner)
    except RankError as error:
        return f"error: {str(error).strip().splitlines()[-1]}"
    if any(outcome.error for outcome in outcomes):
        ranks.stop()  # a failed backward may have left DDP, or the group, in any state
    return next((text for text in map(_failure, outcomes) if text), _splits(outcomes[0]))


def _failure(outcome: Outcome) -> str | None:
    if outcome.eager_error is not None and outcome.error == outcome.eager_error:
        return f"not possible in eager DDP: {_short(outcome.error)}"
    if outcome.error is not None:
        return f"error: {_short(outcome.error)}"
    if outcome.difference is not None:
        return f"differs: {_short(outcome.difference)}"
    return None


def _splits(outcome: Outcome) -> str:
    if set(outcome.pieces) == {1}:
        return "equal, whole"
    return f"equal, {' + '.join(map(str, outcome.pieces))} of {outcome.num_buckets}"


def _short(text: str, length: int = 100) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= length else f"{text[:length].rsplit(' ', 1)[0]} ..."


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = "\n".join(_lines())
    DOCUMENT.parent.mkdir(exist_ok=True)
    introduction = _INTRODUCTION.format(torch=torch.__version__, releases=_RELEASES)
    DOCUMENT.write_text(introduction + table + "\n")
