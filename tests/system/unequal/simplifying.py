"""Make a failing script simpler, by what scripts are made of: actions, blocks and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.system.unequal.actions import Step
from tests.system.unequal.script import Script


def simplify(script: Script, fails: Callable[[Script], bool]) -> Script:
    """A script that fails, and no longer fails if anything is left out."""
    simpler = next(filter(fails, simpler_scripts(script)), None)
    while simpler is not None:
        script = simpler
        simpler = next(filter(fails, simpler_scripts(script)), None)
    return script


def simpler_scripts(script: Script) -> Iterator[Script]:
    """Scripts that lack one thing of this one, those that lack most first."""
    num_actions = len(script.actions)
    # Halves first: most of a long script has nothing to do with its fault.
    size = num_actions // 2
    while size:
        for begin in range(0, num_actions, size):
            rest = script.actions[:begin] + script.actions[begin + size :]
            if rest:
                yield dataclasses.replace(script, actions=rest)
        size //= 2
    for index in range(len(script.blocks) if len(script.blocks) > 1 else 0):
        blocks = _without(script.blocks, index)
        num_before_break = min(script.num_before_break, len(blocks) - 1)
        yield dataclasses.replace(script, blocks=blocks, num_before_break=num_before_break)
    yield from _with_defaults(script, except_for=("blocks", "actions"))
    for index, block in enumerate(script.blocks):
        for simpler in _with_defaults(block, except_for=("kind",)):
            yield dataclasses.replace(script, blocks=_with(script.blocks, index, simpler))
        if block.kind != "linear":
            linear = dataclasses.replace(block, kind="linear")
            yield dataclasses.replace(script, blocks=_with(script.blocks, index, linear))
    for index, action in enumerate(script.actions):
        for simpler in _simpler_actions(action):
            yield dataclasses.replace(script, actions=_with(script.actions, index, simpler))


def _simpler_actions(action: Any) -> Iterator[Any]:
    yield from _with_defaults(action, except_for=("times",))
    times = action.times if isinstance(action, Step) else 1
    for fewer in dict.fromkeys([1, times // 2, times - 1]):
        if 0 < fewer < times:
            yield dataclasses.replace(action, times=fewer)
    sizes = getattr(action, "sizes", ())
    if len(set(sizes)) > 1:
        yield dataclasses.replace(action, sizes=(sizes[0],) * len(sizes))


def _with_defaults(part: Any, except_for: tuple[str, ...]) -> Iterator[Any]:
    for field in dataclasses.fields(part):
        if field.default is dataclasses.MISSING or field.name in except_for:
            continue
        if getattr(part, field.name) != field.default:
            yield dataclasses.replace(part, **{field.name: field.default})


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return (*items[:index], *items[index + 1 :])
