"""Cases that lack one thing of another; see `campaigns/simplifying.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tests.system.campaigns.simplifying import with_defaults, with_each, without_each
from tests.system.fuzzing.spec import Block, Case


def simpler_cases(case: Case) -> Iterator[Case]:
    """Give cases that lack one thing of this one, those that lack most first."""
    for blocks in _simpler_blocks(case.blocks):
        yield dataclasses.replace(case, blocks=blocks)
    if len(case.batches) > 2:
        yield dataclasses.replace(case, batches=case.batches[:-1])
    if max(map(len, case.batches)) > 1:
        yield dataclasses.replace(case, batches=tuple(sizes[:1] for sizes in case.batches))
    yield from with_defaults(case, except_for=("blocks",))
    for name in ("freezes", "extras"):
        for steps in _simpler_steps(getattr(case, name), len(case.batches)):
            yield dataclasses.replace(case, **{name: steps})
    for name in ("outputs", "actions"):
        for items in without_each(getattr(case, name)):
            yield dataclasses.replace(case, **{name: items})


def _simpler_steps(steps: tuple[str, ...], num_steps: int) -> Iterator[tuple[str, ...]]:
    if len(steps) > num_steps:
        yield steps[:num_steps]
    yield from with_each(steps, lambda how: iter([""] if how else []))


def _simpler_blocks(blocks: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
    for index, block in enumerate(blocks):
        yield (*blocks[:index], *blocks[index + 1 :])
        if block.inner:
            yield (*blocks[:index], *block.inner, *blocks[index + 1 :])
    yield from with_each(blocks, _simpler_block)


def _simpler_block(block: Block) -> Iterator[Block]:
    yield from with_defaults(block, except_for=("kind", "inner"))
    for inner in _simpler_blocks(block.inner):
        if inner:
            yield dataclasses.replace(block, inner=inner)
