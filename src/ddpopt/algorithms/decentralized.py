"""`Decentralized` and `LowPrecisionDecentralized`: ranks average or mix their weights.

Source: decentralized SGD and its low-precision variant as in Bagua (Gan et al., arXiv 2107.01499).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ddpopt import _torch
from ddpopt._values import check_choice
from ddpopt.algorithms.algorithm import HierarchicalAlgorithm
from ddpopt.algorithms.background import leave_in_flight
from ddpopt.algorithms.bytegrad import are_finite, compress, decompress
from ddpopt.algorithms.comm import Communicator, FlatWeights, Work
from ddpopt.algorithms.handle import BackgroundHandle, Handle
from ddpopt.algorithms.training import Training
from ddpopt.errors import AttachError, NonFiniteError, OptionError
from ddpopt.ranks.agree import Fact, communicating
from ddpopt.ranks.store import name_ranks

BUCKET_BYTES = 10 * 2**20  # weights that share one range of codes


class DecentralizedHandle(BackgroundHandle):
    """As `Handle`: a step's forward begins an average, and its update takes it."""

    algorithm: Decentralized
    # The weights that were sent, and their average to come; from a step's forward to its update.
    _sent: Sequence[torch.Tensor] = ()
    _averaged: torch.futures.Future[list[torch.Tensor]] | None = None

    def begin_step(self) -> None:
        if (self.num_steps - 1) % self.algorithm.communication_interval == 0:
            sent, num_exchanges = self.weights.copy(), self.num_communications
            self._sent = sent
            self._averaged = self.worker.submit(lambda: self._average(sent, num_exchanges))
            self.num_communications += 1

    def before_update(self) -> None:
        averaged, self._averaged = self._averaged, None
        sent, self._sent = self._sent, ()
        if averaged is not None:  # else another optimizer's update took it, or none was begun
            with communicating(f"averaging weights in step {self.num_steps}"):
                mean = averaged.wait()
            # Others may have written to the weights since the forward, and are not to be undone: a
            # guard against NaN that loads a checkpoint, weight decay by hand.
            self.weights.move(sent, mean)

    def _average(self, sent: Sequence[torch.Tensor], num_exchanges: int) -> list[torch.Tensor]:
        """The average of the weights that ranks have sent; run by the worker. Collective.

        `num_exchanges` is how many averages there were before, by which the peer is chosen.
        """

        def mean_with_peer(leaders: Communicator, values: torch.Tensor) -> None:
            peer = rotating_peer(leaders.rank, leaders.num_ranks, num_exchanges)
            (other,) = leaders.swap(values, [peer])
            # Each is halved before they are added, see `Communicator.divisors`.
            values.div_(2).add_(other, alpha=0.5)

        mean = Communicator.mean if self.algorithm.peer_selection == "all" else mean_with_peer
        flat = [values.clone() for values in sent]
        for values in flat:
            self.groups.reduce(values, mean)
        return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Decentralized(HierarchicalAlgorithm[DecentralizedHandle]):
    """Ranks average their weights with all others, or with one other rank in turn.

    In step t a copy of rank i's weights x_i is averaged while it computes its gradient at x_i.
    Before the update the average replaces the weights: x_i <- mean_j(x_j) for `"all"`,
    (x_i + x_peer) / 2 for `"shift_one"`. Then the optimizer takes a step with that gradient.
    If weights were written since the copy was made, they move by the average less the copy.

    Attributes:
        peer_selection: `"all"`, or `"shift_one"`: one peer, in turn each rank of the other half, at
            a fraction of the traffic, for an even number of ranks (of nodes, if hierarchical).
        hierarchical: Average within each node first, then between nodes.
        communication_interval: Steps from one average to the next; the first step has one.
    """

    handle_type = DecentralizedHandle
    peer_selection: str = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        # A bare super() would look for the class from which dataclass(slots=True) made this one.
        HierarchicalAlgorithm.__post_init__(self)
        check_choice("peer_selection", self.peer_selection, ("all", "shift_one"))

    def check(self, training: Training) -> None:
        num_ranks = training.group.size()
        ranks_per_node = self.ranks_per_node(num_ranks)
        num_peers = num_ranks // ranks_per_node
        if self.peer_selection == "shift_one" and num_peers % 2:
            kind = f"nodes of {ranks_per_node} ranks" if self.hierarchical else "ranks"
            raise OptionError(
                f"peer_selection='shift_one' pairs an even number, and there are {num_peers} "
                f"{kind} (hierarchical={self.hierarchical}; True is the default); use "
                "peer_selection='all', or hierarchical=False with an even number of ranks"
            )


def rotating_peer(rank: int, num_ranks: int, num_exchanges: int) -> int:
    """The rank that `rank` averages with after `num_exchanges` earlier exchanges.

    `num_ranks` is even. The lower half of the ranks rotates against the upper half: each meets
    every rank of the other half in `num_ranks / 2` exchanges, and is its peer's peer.
    """
    half = num_ranks // 2
    if rank < half:
        return (num_exchanges + rank) % half + half
    return (rank - half - num_exchanges) % half


class Replicas(NamedTuple):
    """Last sent weights of a rank and its neighbours: flat, one tensor per bucket."""

    own: list[torch.Tensor]
    left: list[torch.Tensor]
    right: list[torch.Tensor]


class LowPrecisionDecentralizedHandle(Handle):
    """As `Handle`, with `resync`. `average` renews `replicas`, which are part of the saved state.

    They are W, L and R (see LowPrecisionDecentralized), None on ranks that lead no node.
    """

    algorithm: LowPrecisionDecentralized

    def __init__(self, training: Training, algorithm: LowPrecisionDecentralized) -> None:
        super().__init__(training, algorithm)
        self.weights = FlatWeights(training.parameters, BUCKET_BYTES)
        self.replicas: Replicas | None = None
        if self.groups.leaders is not None:  # all ranks have equal weights now
            self.replicas = Replicas(*(self.weights.copy() for _ in range(3)))

    def end_step(self) -> None:
        """Exchange what this step changed, and mix the weights. Collective."""
        if (self.num_steps - 1) % self.algorithm.communication_interval:
            return
        flat = self.weights.copy()
        with communicating(f"exchanging compressed weights in step {self.num_steps}"):
            for values in flat:
                self.groups.average_node(values)
            # A message for each bucket of weights; none on ranks that lead no node.
            messages = [] if self.replicas is None else _encode_changes(flat, self.replicas)
            flags, work = self._collect_flags(messages)
            # The messages of this leader, the left and the right one, in the order of `Replicas`.
            try:
                received = self._swap(torch.cat(messages)) if messages else []
            except BaseException:
                # Nobody waits for the flags any more, whose collective may still write to them.
                leave_in_flight(work, flags, self.groups.everyone.group)
                raise
            work.wait()
        self._raise_problem(flags.tolist())  # before replicas or weights change
        if self.replicas is not None:
            sizes = [len(message) for message in messages]
            for replica, all_messages in zip(self.replicas, received, strict=True):
                for values, message in zip(replica, torch.split(all_messages, sizes), strict=True):
                    values.add_(decompress(message.view(1, -1)).view(-1))
            flat = self.replicas.own
        with communicating(f"sending each node its weights in step {self.num_steps}"):
            for values in flat:
                self.groups.broadcast_to_node(values)
        self.weights.assign(flat)
        self.num_communications += 1

    def resync(self) -> None:
        """Send the neighbours the current weights, uncompressed. Collective.

        Call it after anything but the optimizer has changed weights, such as `load_state_dict` of
        the model without that of this handle.
        """
        self.settle()
        if self.replicas is not None:
            with communicating("sending the neighbours uncompressed weights"):
                swapped = [self._swap(values) for values in self.weights.copy()]
            # In place: what is made in torch.inference_mode() could not be written to outside.
            for index, of_ring in enumerate(swapped):
                for replica, received in zip(self.replicas, of_ring, strict=True):
                    replica[index].copy_(received)

    def average(self) -> None:
        super().average()
        self.resync()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()  # first: it may end a step, whose exchange changes replicas
        replicas = self.replicas
        copies = replicas and [[values.clone() for values in replica] for replica in replicas]
        place = self.groups.ring_index, self.groups.ring_size
        return {**state, "place": place, "replicas": copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for replica, saved in zip(self.replicas or (), state.get("replicas") or (), strict=True):
            for values, copied in zip(replica, saved, strict=True):
                values.copy_(copied)

    def check_state(self, state: dict[str, Any]) -> list[Fact]:
        facts = super().check_state(state)
        place = self.groups.ring_index, self.groups.ring_size
        if tuple(state.get("place", ())) != place:  # a checkpoint's format may make it a list
            raise OptionError(
                f"the state is of place {state.get('place')} (index, number of ranks or nodes) in "
                f"the ring, and this rank has {place}; load weights and call resync instead"
            )
        found, expected = _shapes(state.get("replicas")), _shapes(self.replicas)
        if found != expected:
            raise OptionError(
                f"the state's replicas have shapes {found}, and this model's have {expected}; "
                "load the state of this model"
            )
        return facts

    def _swap(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return this leader's `values`, the left and the right one's, and send them this one's."""
        leaders = self.groups.leaders
        assert leaders is not None
        ring = [(leaders.rank + step) % leaders.num_ranks for step in (0, -1, 1)]
        return leaders.swap(values, ring)

    def _collect_flags(self, messages: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Work]:
        """Start collecting two flags of each rank: weights not finite, a parameter not known."""
        training = self.training
        all_known = _torch.trainable_parameters(training.ddp).keys() <= training.parameters.keys()
        flags = torch.tensor([0, not all_known], dtype=torch.int32, device=training.device)
        for message in messages:
            flags[0] |= ~are_finite(message.view(1, -1))
        return self.groups.everyone.collect(flags)

    def _raise_problem(self, flags: Sequence[Sequence[int]]) -> None:
        """Raise on all ranks what is wrong on one."""
        non_finite = [rank for rank, (is_non_finite, _) in enumerate(flags) if is_non_finite]
        unknown = [rank for rank, (_, has_unknown) in enumerate(flags) if has_unknown]
        if unknown:
            raise AttachError(
                f"on {name_ranks(unknown)} a parameter is trainable that DDP does not reduce and "
                "the algorithm does not know, since it was frozen when DDP was made and it was "
                "attached; detach it, then wrap the model in DDP and attach it again"
            )
        if non_finite:
            raise NonFiniteError(
                f"on {name_ranks(non_finite)}, or another one of its node, weights in step "
                f"{self.num_steps} are NaN, infinite or too large for 8-bit codes; no rank has "
                "mixed its weights; load a checkpoint and look for the cause as without compression"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionDecentralized(HierarchicalAlgorithm[LowPrecisionDecentralizedHandle]):
    """Each rank mixes its weights with its two neighbours', sent with one byte per weight.

    Each rank keeps W, its weights as it last sent them, and replicas L and R of its neighbours'
    W. After the optimizer has turned W into x, the rank sends both neighbours the codes of
    z = x + L/3 + R/3 - 5/3 W, so that W + z is (L + W + R)/3 + (x - W): the mean of the three, and
    what its own update changed. All add what the codes stand for: the rank itself to W, which
    becomes its weights, and its neighbours to their replicas, which stay bitwise equal to the W
    that they copy. With two ranks, both replicas copy the other one's.

    Attributes:
        hierarchical: Average within each node first, then mix between nodes.
        communication_interval: Steps from one exchange to the next; the first step has one.
    """

    handle_type = LowPrecisionDecentralizedHandle
    communication_interval: int = 1

    def check(self, training: Training) -> None:
        groups = (group for optimizer in training.optimizers for group in optimizer.param_groups)
        optimized = {parameter for group in groups for parameter in group["params"]}
        for parameter, described in training.parameters.items():
            if parameter.requires_grad and parameter not in optimized:
                raise AttachError(
                    f"{described.name} is trainable and in none of the optimizers given to attach, "
                    "so that its updates would not be seen; give all optimizers, or freeze it "
                    "before DDP is made"
                )


def _encode_changes(flat: Sequence[torch.Tensor], replicas: Replicas) -> list[torch.Tensor]:
    """The message of z = x + L/3 + R/3 - 5/3 W for each bucket; see LowPrecisionDecentralized."""
    messages = []
    for x, own, left, right in zip(flat, *replicas, strict=True):
        # At least in float32: z is a small difference of large numbers.
        z = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        z.add_(left, alpha=1 / 3).add_(right, alpha=1 / 3).sub_(own, alpha=5 / 3)
        messages.append(compress(z.view(1, -1)).view(-1))
    return messages


def _shapes(replicas: Any) -> Any:
    """The types and shapes of replicas, or of what a state has instead of them."""
    try:
        return replicas and [[(v.dtype, list(v.shape)) for v in replica] for replica in replicas]
    except (TypeError, AttributeError):
        return f"of a {type(replicas).__name__} without tensors"
