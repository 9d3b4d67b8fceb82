"""The kinds of numbers by which this package knows things: each a type of its own.

    facts.gradients[argument]        # the calls from which an argument's gradient is computed
    facts.gradients[parameter]       # mypy refuses it: a parameter's index is no argument

At run time each is an int. A number of one kind becomes another only by a call that says so, as
in `memory_of_argument`. Sizes (`num_bytes`) and counts (`num_calls`) are plain ints: they are added
and compared, and lead to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NewType, TypeVar

# ---- DDP's Reducer -----------------------------------------------------------------------------

# A parameter's position in the Reducer's list, which is in order of registration.
ParameterIndex = NewType("ParameterIndex", int)
# A bucket's position in the order in which the Reducer launches allreduces.
BucketIndex = NewType("BucketIndex", int)

# ---- A graph -----------------------------------------------------------------------------------

# The position of an input of Dynamo's graph, and so of an argument of the compiled forward.
# AOTAutograd returns a gradient for each.
Argument = NewType("Argument", int)
# A call's number in its graph, in graph order. Placeholders, attributes and the output are none.
Call = NewType("Call", int)
# A place in the graph, as the program has it: behind the call of this number, or, for -1, in front
# of all. Calls stand at places, and gradients are released at places, whenever they run.
Place = NewType("Place", int)
# The number of a call of an `autograd.Function` in Dynamo's graph, see `mark_functions` in
# split/releases.py.
FunctionNumber = NewType("FunctionNumber", int)
# Memory that the program can reach: for an argument's the argument's own number, for other memory
# a number below zero.
Memory = NewType("Memory", int)

# ---- Its sections ------------------------------------------------------------------------------

# A call's position in the order in which sections run the calls. A boundary at p separates the call
# at p, and those behind it, from those before it. In a cut forward that order is the graph's.
Position = NewType("Position", int)
# A section's index: in forward order, or, of a backward, in the order in which sections run.
SectionIndex = NewType("SectionIndex", int)
# The number of a stage, see [Note: stages and boundaries] in split/sections.py.
Stage = NewType("Stage", int)
# Where a value is in the list on which the sections of one backward work, see split/backward.py.
Slot = NewType("Slot", int)

BEFORE_ALL_CALLS = Place(-1)


def memory_of_argument(argument: Argument) -> Memory:
    """The memory in which an argument's tensor is."""
    return Memory(argument)


_Index = TypeVar("_Index", bound=int)
_Value = TypeVar("_Value")


def numbered(
    _kind: Callable[[int], _Index], values: Iterable[_Value]
) -> Iterable[tuple[_Index, _Value]]:
    """What `enumerate` yields, with numbers of this kind."""
    return enumerate(values)  # type: ignore[return-value]  # ints, which numbers of a kind are
