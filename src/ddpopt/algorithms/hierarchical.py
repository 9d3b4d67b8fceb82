"""`HierarchicalAlgorithm`: for algorithms that may average within each node first."""

from __future__ import annotations

from dataclasses import dataclass

from ddpopt.algorithms._runtime.groups import ranks_per_node
from ddpopt.algorithms._runtime.handle import Algorithm, HandleT, Training
from ddpopt.algorithms._runtime.values import check_boolean, check_count
from ddpopt.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalAlgorithm(Algorithm[HandleT]):
    """As `Algorithm`; see [Note: hierarchical] in `algorithms/groups.py`."""

    hierarchical: bool = True
    local_world_size: int | None = None

    def __post_init__(self) -> None:
        check_boolean("hierarchical", self.hierarchical)
        if self.local_world_size is not None:
            check_count("local_world_size", self.local_world_size, 1)

    def find_problem(self, training: Training) -> Exception | None:
        """Say why this cannot be attached there."""
        try:
            self.ranks_per_node(training)
        except OptionError as error:
            return error
        return None

    def ranks_per_node(self, training: Training) -> int:
        """Return how many ranks average before their node communicates; 1 if not hierarchical."""
        return ranks_per_node(self.hierarchical, self.local_world_size, training.group.size())
