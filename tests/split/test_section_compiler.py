"""Progress that `split/section_compiler.py` prints while sections are compiled."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt.split import section_compiler
from tests.support.beside import compiled
from tests.support.fake_clock import FakeClock
from tests.support.logs import logged
from tests.support.models import MLP


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_a_long_compile_tells_which_section_it_is_at(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """One that is short tells nothing."""
    for quiet_s, expected in ((1e9, []), (-1.0, [1, 2, 3])):
        monkeypatch.setattr(section_compiler, "_BETWEEN_REPORTS_S", quiet_s)
        torch._dynamo.reset()
        ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
        with logged("progress") as lines:
            compiled(ddp, split=split)(torch.randn(2, 64)).sum().backward()
        numbers = re.findall(r"compiling section (\d+) of 3", "\n".join(lines))
        assert [int(number) for number in numbers] == expected
        assert len(lines) == len(expected)


def test_a_compile_of_many_sections_tells_no_more_often_than_every_3_s() -> None:
    """A hundred sections of half a second each: from the third second on, every sixth."""
    compiler = section_compiler.SectionCompiler("0/0", 100, _began_s=0.0)
    clock = FakeClock(tick_s=0.5)
    with logged("progress") as lines, clock.replacing_time_of(section_compiler):
        for index in range(100):
            compiler.compile(index, "", lambda: None)
    numbers = re.findall(r"compiling section (\d+) of 100", "\n".join(lines))
    assert [int(number) for number in numbers] == list(range(7, 101, 6))
