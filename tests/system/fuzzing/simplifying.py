"""Make a failing case simpler, by what cases are made of.

Each try costs a compile. Hypothesis shrinks the choices that a case was drawn from, and needs
hundreds of tries to leave a block out; this takes one for each thing that can be left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.system.fuzzing.spec import Block, Case

_Part = TypeVar("_Part", Block, Case)


def simplify(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return a case that fails, and no longer fails if anything is left out."""
    simpler = next((candidate for candidate in simpler_cases(case) if fails(candidate)), None)
    while simpler is not None:
        case = simpler
        simpler = next((candidate for candidate in simpler_cases(case) if fails(candidate)), None)
    return case


def simpler_cases(case: Case) -> Iterator[Case]:
    """Give cases that lack one thing of this one, those that lack most first."""
    for blocks in _simpler_blocks(case.blocks):
        yield dataclasses.replace(case, blocks=blocks)
    if len(case.batches) > 2:
        yield dataclasses.replace(case, batches=case.batches[:-1])
    if max(map(len, case.batches)) > 1:
        yield dataclasses.replace(case, batches=tuple(sizes[:1] for sizes in case.batches))
    yield from _with_defaults(case, except_for=("blocks",))
    for name in ("freezes", "extras"):
        for steps in _simpler_steps(getattr(case, name), len(case.batches)):
            yield dataclasses.replace(case, **{name: steps})
    for name in ("outputs", "actions"):
        items = getattr(case, name)
        for index in range(len(items) if len(items) > 1 else 0):
            yield dataclasses.replace(case, **{name: _without(items, index)})


def _simpler_steps(steps: tuple[str, ...], num_steps: int) -> Iterator[tuple[str, ...]]:
    if len(steps) > num_steps:
        yield steps[:num_steps]
    for index, how in enumerate(steps):
        if how:
            yield (*steps[:index], "", *steps[index + 1 :])


def _simpler_blocks(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    for index, block in enumerate(blocks):
        yield _without(blocks, index)
        if block.inner:
            yield (*blocks[:index], *block.inner, *blocks[index + 1 :])
    for index, block in enumerate(blocks):
        simpler = [
            *_with_defaults(block, except_for=("kind", "inner")),
            *(dataclasses.replace(block, inner=i) for i in _simpler_blocks(block.inner) if i),
        ]
        for other in simpler:
            yield (*blocks[:index], other, *blocks[index + 1 :])


def _with_defaults(part: _Part, except_for: tuple[str, ...]) -> Iterator[_Part]:
    for field in dataclasses.fields(part):
        if field.name not in except_for and getattr(part, field.name) != field.default:
            yield dataclasses.replace(part, **{field.name: field.default})


def _without(items: tuple, index: int) -> tuple:
    return (*items[:index], *items[index + 1 :])
