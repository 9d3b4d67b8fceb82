"""Scripts that lack one thing of another: actions, blocks, options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tests.system.campaigns.simplifying import with_defaults, with_each, without_each
from tests.system.unequal.actions import Step
from tests.system.unequal.script import Block, Script


def simpler_scripts(script: Script) -> Iterator[Script]:
    """Give scripts that lack one thing of this one, those that lack most first."""
    num_actions = len(script.actions)
    # Halves first: most of a long script has nothing to do with its fault.
    size = num_actions // 2
    while size:
        for begin in range(0, num_actions, size):
            rest = script.actions[:begin] + script.actions[begin + size :]
            if rest:
                yield dataclasses.replace(script, actions=rest)
        size //= 2
    for blocks in without_each(script.blocks):
        num_before_break = min(script.num_before_break, len(blocks) - 1)
        yield dataclasses.replace(script, blocks=blocks, num_before_break=num_before_break)
    yield from with_defaults(script, except_for=("blocks", "actions"))
    for blocks in with_each(script.blocks, _simpler_block):
        yield dataclasses.replace(script, blocks=blocks)
    for actions in with_each(script.actions, _simpler_action):
        yield dataclasses.replace(script, actions=actions)


def _simpler_block(block: Block) -> Iterator[Block]:
    yield from with_defaults(block, except_for=("kind",))
    if block.kind != "linear":
        yield dataclasses.replace(block, kind="linear")


def _simpler_action(action: Any) -> Iterator[Any]:
    yield from with_defaults(action, except_for=("times",))
    times = action.times if isinstance(action, Step) else 1
    for fewer in dict.fromkeys([1, times // 2, times - 1]):
        if 0 < fewer < times:
            yield dataclasses.replace(action, times=fewer)
    sizes = getattr(action, "sizes", ())
    if len(set(sizes)) > 1:
        yield dataclasses.replace(action, sizes=(sizes[0],) * len(sizes))
