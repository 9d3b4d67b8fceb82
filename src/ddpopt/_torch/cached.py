"""A cut backward as AOTAutograd's cache holds it.

Loading this module loads Inductor.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ddpopt._torch import names

if TYPE_CHECKING:
    _OutputCode = object
else:
    _OutputCode = names.OUTPUT_CODE.get()

# (the compiled sections, data for running them) -> the backward that AOTAutograd runs
MakeBackward = Callable[[Sequence[Any], Any], Callable[[list[Any]], Any]]
_maker: contextvars.ContextVar[MakeBackward] = contextvars.ContextVar("ddpopt_maker")


@contextlib.contextmanager
def made_by(make_backward: MakeBackward) -> Iterator[None]:
    """Make with this function what runs in each `CutBackward` that is made or loaded in the block.

    The function is not stored with the sections, so whoever loads them has to give it. It gets the
    compiled sections and `data`, and returns the backward.
    """
    token = _maker.set(make_backward)
    try:
        yield
    finally:
        _maker.reset(token)


class CutBackward(_OutputCode):
    """Sections as Inductor compiled them, and data for running them.

    A cache entry holds one in place of a compiled backward. Whatever is wrong with an entry raises
    while torch loads it, which torch treats as a miss.
    """

    def __init__(self, sections: Sequence[Any], data: Any) -> None:
        self.sections = list(sections)
        self.data = data
        names.BOXED_CALL.set_on_ours(self, True)  # as AOTAutograd requires
        self._call: Any = _maker.get()(self.sections, data)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the first section, and begin a run of the others."""
        return self._call(inputs)

    def prepare_for_serialization(self) -> None:
        """Drop what cannot be stored. torch calls this on a copy before storing it."""
        self._call = None
        self.sections = [copy.copy(section) for section in self.sections]
        for section in self.sections:
            section.prepare_for_serialization()

    def post_compile(self, inputs: Any, _constants: Any, settings: Any) -> None:
        """Load the sections. torch calls this on what it has read from its cache, not on new ones.

        `inputs` are the cached graph's, of which Inductor takes the symbols that sizes have;
        `settings` are keywords of Inductor's. torch made the constants for a graph of one piece.
        """
        sections = []
        for section in self.sections:
            loadable = names.OUTPUT_LOADABLE.get()(section)
            sections.append(loadable.post_compile(loadable.load(inputs), settings))
        self.sections = sections
        self._call = _maker.get()(sections, self.data)

    def set_triton_bundle(self, _bundle: Any) -> None:
        """Leave Triton's kernels to the sections, which have them already."""


def are_storable(graphs: Sequence[Any]) -> bool:
    """Whether Inductor compiled all of them, and would store each in its own cache."""
    return all(
        isinstance(graph, _OutputCode) and names.CACHE_KEY.get(graph) is not None
        for graph in graphs
    )
