"""`Algorithm`, what ranks communicate and when: the values that users choose for it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from ddpopt._text import quote
from ddpopt._values import Limits, check_boolean, check_number
from ddpopt.algorithms.training import Training
from ddpopt.errors import OptionError

# The class of the handles that `attach` makes of an algorithm. Its bound, `Handle`, is in
# `attach.py`: a handle knows its algorithm, so this module may not know handles.
HandleT = TypeVar("HandleT")


class Algorithm(Generic[HandleT]):
    """What ranks communicate and when; a frozen dataclass that checks its values when created.

    Values out of range raise OptionError, values of another type TypeError. An algorithm itself
    communicates nothing and keeps nothing: `attach` makes a handle of it, an object of its
    `handle_type`, which does.
    """

    __slots__ = ()
    handle_type: type[HandleT]
    # Whether its handles need `groups.agreement`, a process group for flags on the CPU.
    agrees_on_cpu: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return type(self).__name__

    def ranks_per_node(self, num_ranks: int) -> int:
        """How many ranks average among themselves before their node communicates."""
        return 1

    def check(self, training: Training) -> None:
        """Raise the reason if this cannot be attached to `training`, as far as this rank knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalAlgorithm(Algorithm[HandleT]):
    """As `Algorithm`, optionally hierarchical; flags must be bool, and counts at least 1.

    Attributes:
        hierarchical: See [Note: hierarchical] in `algorithms/comm.py`.
        local_world_size: Ranks on each node; None means LOCAL_WORLD_SIZE, which torchrun sets.
    """

    hierarchical: bool = True
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        # Also the flags and counts that subclasses add; what else they add they check themselves.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                check_boolean(field.name, value, TypeError)
            elif isinstance(field.default, int):
                check_count(field.name, value, 1)
        if self.local_world_size is not None:
            check_count("local_world_size", self.local_world_size, 1)

    def ranks_per_node(self, num_ranks: int) -> int:
        """How many ranks average among themselves before their node communicates; 1 if flat.

        Raises:
            OptionError: the number of ranks on each node is unknown, or does not divide
                `num_ranks`.
        """
        if not self.hierarchical:
            return 1
        given = str(self.local_world_size or os.environ.get("LOCAL_WORLD_SIZE", ""))
        if not given:
            raise OptionError(
                "hierarchical=True (the default) needs the number of ranks on each node, and "
                "LOCAL_WORLD_SIZE is not set; start with torchrun, give local_world_size, or pass "
                "hierarchical=False"
            )
        if not given.isdecimal() or not int(given):
            raise OptionError(
                f"LOCAL_WORLD_SIZE is {quote(given)}; it must be a whole number above 0"
            )
        size = int(given)
        if num_ranks % size:
            raise OptionError(
                f"{num_ranks} ranks cannot be divided into nodes of {size} (local_world_size or "
                "LOCAL_WORLD_SIZE); pass hierarchical=False, or equal numbers of ranks on all nodes"
            )
        return size


def check_count(name: str, value: object, least: int) -> None:
    """Raise TypeError unless `value` is an int, OptionError if it is below `least`."""
    limits = Limits(at_least=least, is_whole=True)
    check_number(name, value, limits, OptionError, wrong_type=TypeError)
