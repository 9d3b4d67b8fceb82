"""The algorithms once more: all ranks in one process, in plain arithmetic, from their papers.

    simulator = simulator_of(algorithm, models)
    for x_of_each_rank in inputs:
        simulator.step([model(x) for model, x in zip(models, x_of_each_rank)])

Equations: decentralized SGD, its low-precision variant and ByteGrad as in Bagua (Gan et al., arXiv
2107.01499), QAdam as in 1-bit Adam (Tang et al., arXiv 2102.02888), with the differences that
docs/algorithms.md lists. What a step is: [Note: steps] in `ddpopt/algorithms/handle.py`.

All gradients are one bucket, with a chunk for each rank, or node. DDP may order the parameters in
it otherwise, which changes nothing where one is a model's only one, or each is a chunk of its own.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    LowPrecisionDecentralized,
    QAdam,
    attach,
)
from tests.support.algorithms import flat_weights
from tests.support.models import batches

Optimizers = Sequence[torch.optim.Optimizer]

# ---- Arithmetic ----------------------------------------------------------------------------------


def mean(values: Iterable[torch.Tensor]) -> torch.Tensor:
    values = list(values)
    return sum(values[1:], start=values[0]) / len(values)


def codes_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of one chunk, and what they stand for: MinMaxUInt8 with a clamp."""
    x = values.float()
    scale = 255 / (x.max() - x.min() + 1e-7)
    highest = torch.round(x.max() * scale)
    lowest = highest - 255
    codes = (torch.minimum(torch.round(x * scale), highest) - lowest).clamp(0, 255)
    return codes, (codes + lowest) / scale


def in_8_bits(values: torch.Tensor) -> torch.Tensor:
    return codes_of(values)[1]


def mean_in_8_bits(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of equally long flat tensors, each a rank's: of a chunk by each rank, coded twice.

    The last chunks are filled up with zeros. One rank alone codes nothing.
    """
    num_ranks, size = len(values), values[0].numel()
    if num_ranks == 1:
        return values[0]
    padding = values[0].new_zeros(-size % num_ranks)
    rows = [torch.cat([v, padding]).chunk(num_ranks) for v in values]
    means = [mean(in_8_bits(row[index]) for row in rows) for index in range(num_ranks)]
    return torch.cat([in_8_bits(chunk) for chunk in means])[:size].to(values[0].dtype)


# Who a rank averages with in the first exchanges, one row an exchange: Bagua's rotation of the
# lower half of the ranks against the upper half.
PEERS = {
    2: ["10", "10"],
    4: ["2301", "3210", "2301"],
    6: ["345012", "453201", "534120", "345012"],
    8: ["45670123", "56743012", "67452301", "74561230"],
}


def peer_of(rank: int, num_ranks: int, exchange: int) -> int:
    """The table's peer; after half as many exchanges as there are ranks it begins anew."""
    return int(PEERS[num_ranks][exchange % (num_ranks // 2)][rank])


# ---- What all algorithms share -------------------------------------------------------------------


class Place(enum.Enum):
    """Where a backward runs in which DDP reduces."""

    STEP = "a step"
    PAUSE = "a pause"
    NO_SYNC = "no_sync, after a forward outside of it that had no backward"


class Simulator:
    """An algorithm at work on the models of all ranks, which have equal weights.

    `optimizers` has those of each rank. A loop tells it of each forward with gradients, each
    backward and each update; between those it may write to the models.
    """

    def __init__(
        self, algorithm: Any, models: Sequence[nn.Module], optimizers: Sequence[Optimizers]
    ) -> None:
        self.algorithm, self.models, self.optimizers = algorithm, models, optimizers
        self.ranks = range(len(models))
        self._node_size = getattr(algorithm, "local_world_size", None) or 1
        if not getattr(algorithm, "hierarchical", False):
            self._node_size = 1
        self.attach()

    def attach(self) -> None:
        """Begin, with rank 0's weights and optimizer states everywhere."""
        self.num_steps = self.num_communications = 0
        self._open_ranks: set[int] = set()  # those whose step has begun and has not ended
        self._has_run_backward = False
        self._updated: list[set[Any]] = [set() for _ in self.ranks]
        for rank in self.ranks[1:]:
            self.models[rank].load_state_dict(self.models[0].state_dict())
            for own, of_rank_0 in zip(self.optimizers[rank], self.optimizers[0], strict=True):
                own.load_state_dict(copy.deepcopy(of_rank_0.state_dict()))

    # ---- What a loop does ----

    def forward(self, *, is_training: bool = True) -> None:
        """Before a forward with gradients, outside of `no_sync`."""
        if not self._open_ranks or self._has_run_backward:
            self.settle()
            if is_training:
                self._open()

    def backward(self, losses: Sequence[torch.Tensor]) -> None:
        """A backward that reduces gradients, in a step."""
        if not self._open_ranks:
            self._open()
        self._has_run_backward = True
        self.reduce_in(losses, Place.STEP)

    def reduce_in(self, losses: Sequence[torch.Tensor], place: Place) -> None:
        """A backward in which DDP reduces."""
        for loss in losses:
            loss.backward()
        self._reduce(place)

    def update(self, ranks: Sequence[int] | None = None, num_optimizers: int | None = None) -> None:
        """The first optimizers of some ranks make their updates, by default all of them."""
        for rank in self.ranks if ranks is None else ranks:
            for optimizer in self.optimizers[rank][:num_optimizers]:
                self._before_update(rank)
                optimizer.step()
                self._updated[rank].add(optimizer)
        self._end([r for r in self.ranks if self._updated[r] == set(self.optimizers[r])])

    def settle(self) -> None:
        """End the step of all ranks whose update was left out."""
        still_open = sorted(self._open_ranks)
        for rank in still_open:
            self._before_update(rank)
        self._end(still_open)

    def average(self) -> None:
        self.settle()
        self._assign(mean(flat_weights(model) for model in self.models))

    def step(self, outputs: Sequence[torch.Tensor]) -> None:
        """A whole step with these outputs of the models, whose mean squares are the losses."""
        self.clear()
        self.forward()
        self.backward([output.square().mean() for output in outputs])
        self.update()

    def clear(self) -> None:
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                optimizer.zero_grad()

    def _open(self) -> None:
        self.num_steps += 1
        self._open_ranks, self._has_run_backward = set(self.ranks), False
        self._begin_step()

    def _end(self, ranks: Sequence[int]) -> None:
        ended = [rank for rank in ranks if rank in self._open_ranks]
        for rank in ranks:
            self._updated[rank].clear()
            self._open_ranks.discard(rank)
        if ended and not self._open_ranks:
            self._end_step()

    def _is_exchange(self) -> bool:
        """Whether weights are exchanged in this step; they are in the first one."""
        return (self.num_steps - 1) % self.algorithm.communication_interval == 0

    # ---- What an algorithm does ----

    def _begin_step(self) -> None:
        pass

    def _reduce(self, place: Place) -> None:
        """Do with the gradients of all ranks what is done in place of DDP's allreduce."""

    def _before_update(self, rank: int) -> None:
        pass

    def _end_step(self) -> None:
        pass

    # ---- Values of ranks and of nodes ----

    def _mean_of_nodes(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        starts = range(0, len(values), self._node_size)
        return [mean(values[start : start + self._node_size]) for start in starts]

    def _of_nodes(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What each rank gets of its node's value."""
        return [values[rank // self._node_size] for rank in self.ranks]

    def reduce_exactly(self) -> None:
        """As DDP's own allreduce does."""
        self._replace_gradients(mean(flat_gradients(model) for model in self.models))

    def _reduce_in_8_bits(self) -> None:
        nodes = self._mean_of_nodes([flat_gradients(model) for model in self.models])
        self._replace_gradients(mean_in_8_bits(nodes))

    def _replace_gradients(self, flat: torch.Tensor) -> None:
        for model in self.models:
            parameters = list(model.parameters())
            parts = flat.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.detach().clone().view_as(parameter)

    def _assign(self, weights: torch.Tensor, ranks: Iterable[int] | None = None) -> None:
        for rank in self.ranks if ranks is None else ranks:
            assign(self.models[rank], weights)


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """All gradients in one tensor, with zeros for those that are None."""
    gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def assign(model: nn.Module, weights: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(weights.detach().clone(), model.parameters())


# ---- The algorithms ------------------------------------------------------------------------------


class SimulatedDecentralized(Simulator):
    """Before the update weights move by the mean less what was averaged, from the step's begin."""

    def attach(self) -> None:
        super().attach()
        self._moves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what was sent, the mean

    def _begin_step(self) -> None:
        if not self._is_exchange():
            return
        sent = [flat_weights(model).clone() for model in self.models]
        nodes = self._mean_of_nodes(sent)
        mixed = [mean(nodes)] * len(nodes)
        if self.algorithm.peer_selection == "shift_one":
            peers = [peer_of(k, len(nodes), self.num_communications) for k in range(len(nodes))]
            mixed = [(nodes[k] + nodes[peer]) / 2 for k, peer in enumerate(peers)]
        self._moves = dict(enumerate(zip(sent, self._of_nodes(mixed), strict=True)))
        self.num_communications += 1

    def _before_update(self, rank: int) -> None:
        if rank in self._moves:
            sent, mixed = self._moves.pop(rank)
            now = flat_weights(self.models[rank])
            self._assign(torch.where(now == sent, mixed, now + (mixed - sent)), [rank])


class SimulatedLowPrecision(Simulator):
    """After the update ranks, or nodes, on a ring mix what each last sent, and their updates.

    `sent` has W of each, in parts that have a range of codes each: `part_sizes`, by default one.
    Replicas L and R are W of the neighbours.
    """

    part_sizes: Sequence[int] = ()

    def attach(self) -> None:
        super().attach()
        self.widths: list[float] = []  # of the ranges of codes in each exchange
        self.resync()

    def resync(self) -> None:
        self.sent = [flat_weights(model).clone() for model in self.models[:: self._node_size]]

    def average(self) -> None:
        super().average()
        self.resync()

    def _end_step(self) -> None:
        if not self._is_exchange():
            return
        nodes = self._mean_of_nodes([flat_weights(model) for model in self.models])
        mixed, width = [], 0.0
        for k, (x, own) in enumerate(zip(nodes, self.sent, strict=True)):
            left, right = self.sent[k - 1], self.sent[(k + 1) % len(nodes)]
            z = x + left * (1 / 3) + right * (1 / 3) - own * (5 / 3)
            parts = z.split(list(self.part_sizes) or [len(z)])
            width = max(width, *(float(part.max() - part.min()) for part in parts), 0.0)
            mixed.append(own + torch.cat([in_8_bits(part) for part in parts]))
        self.sent = mixed
        self.widths.append(width)
        for rank, weights in enumerate(self._of_nodes(mixed)):
            self._assign(weights, [rank])
        self.num_communications += 1


class SimulatedByteGrad(Simulator):
    """Gradients are averaged in 8 bits wherever DDP would reduce them."""

    def _reduce(self, place: Place) -> None:
        self._reduce_in_8_bits()
        self.num_communications += 1


class SimulatedQAdam(Simulator):
    """After the warm-up each rank turns its gradient into a momentum, which is averaged."""

    def attach(self) -> None:
        super().attach()
        self._warm: set[Any] = set()  # parameters that were warm when the step began

    def _begin_step(self) -> None:
        self._warm = {p for optimizer in self._optimizers() for p in optimizer.warm_parameters()}

    def _optimizers(self) -> list[Any]:
        return [optimizer for optimizers in self.optimizers for optimizer in optimizers]

    def _reduce(self, place: Place) -> None:
        if place is not Place.STEP or not self._warm:
            self.reduce_exactly()
        else:
            for optimizer in self._optimizers():
                optimizer.turn_into_momenta(self._warm)
            self._reduce_in_8_bits()
        self.num_communications += place is Place.STEP


class SimulatedAsync(Simulator):
    """Without rounds, which come at times of their own: a warm-up as DDP's, and then local steps.

    So the algorithm is to be aborted when it has been attached.
    """

    def _reduce(self, place: Place) -> None:
        if self.num_steps <= self.algorithm.warmup_steps and place is not Place.PAUSE:
            self.reduce_exactly()


class ReferenceQAdam(torch.optim.Optimizer):
    """What `QAdamOptimizer` says of itself, one parameter after the other."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options}
        self._with_momentum: set[Any] = set()  # in place of a gradient
        super().__init__(params, defaults)

    def _each(self) -> Iterable[tuple[Any, dict[str, Any], dict[str, Any]]]:
        """Parameters that have gradients, with their state and settings."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                        self.state[p].update(step=torch.tensor(0.0), **zeros)
                    yield p, self.state[p], group

    def warm_parameters(self) -> list[nn.Parameter]:
        """Those that have had their warm-up."""
        each = [(p, group) for group in self.param_groups for p in group["params"]]
        return [p for p, group in each if self.state[p].get("step", 0) >= group["warmup_steps"]]

    @torch.no_grad()
    def turn_into_momenta(self, warm: Collection[nn.Parameter]) -> None:
        for p, state, group in self._each():
            if p in warm:
                b1 = group["betas"][0]
                p.grad = b1 * state["exp_avg"] + (1 - b1) * (p.grad + group["weight_decay"] * p)
                self._with_momentum.add(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._with_momentum.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, state, group in self._each():
            (b1, b2), warmup = group["betas"], group["warmup_steps"]
            state["step"] += 1
            t = int(state["step"])
            g = p.grad + group["weight_decay"] * p
            m, v = state["exp_avg"], state["exp_avg_sq"]
            m.copy_(p.grad if p in self._with_momentum else b1 * m + (1 - b1) * g)
            if t <= warmup:
                v.copy_(b2 * v + (1 - b2) * g * g)
            scaled = (v / (1 - b2 ** min(t, warmup))).sqrt() + group["eps"]
            bound = max(1, (1 - b1) / (1 - b2) ** 0.5) if t > warmup else torch.inf
            p.sub_(group["lr"] * (m / (1 - b1**t) / scaled).clamp(-bound, bound))
        self._with_momentum.clear()


_SIMULATORS: dict[type, type[Simulator]] = {
    Decentralized: SimulatedDecentralized,
    LowPrecisionDecentralized: SimulatedLowPrecision,
    ByteGrad: SimulatedByteGrad,
    QAdam: SimulatedQAdam,
    AsyncModelAverage: SimulatedAsync,
}


def simulator_of(
    algorithm: Any, models: Sequence[nn.Module], optimizers: Sequence[Optimizers]
) -> Any:
    return _SIMULATORS[type(algorithm)](algorithm, models, optimizers)


class BesideSimulator:
    """This rank's training, and the simulation of all ranks' beside it, compared after each step.

    Models are made by `make_model`, on each rank with the same weights.
    """

    def __init__(
        self,
        algorithm: Any,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        make_simulated: Callable[[Any], torch.optim.Optimizer] | None = None,
        *,
        shape: tuple[int, ...],
    ) -> None:
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.model = self._seeded(make_model)
        self.ddp = DistributedDataParallel(self.model)
        self._optimizer = make_optimizer(self.model.parameters())
        self.handle: Any = attach(self.ddp, self._optimizer, algorithm)
        self.models = [self._seeded(make_model) for _ in range(num_ranks)]
        make = make_simulated or make_optimizer
        optimizers = [[make(model.parameters())] for model in self.models]
        self.simulator = simulator_of(algorithm, self.models, optimizers)
        dtype = next(self.model.parameters()).dtype
        self._inputs = [
            iter([x.to(dtype) for x in batches(rank, [shape] * 20)]) for rank in range(num_ranks)
        ]
        # A last bit may be a level of a code; in float64 it is as good as never.
        self._tolerance = {"rtol": 1e-7, "atol": 1e-9} if dtype == torch.float64 else {}

    @staticmethod
    def _seeded(make_model: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return make_model()

    def part(self) -> None:
        """Make the weights of ranks different."""
        with torch.no_grad():
            for rank, model in enumerate(self.models):
                for k, parameter in enumerate(model.parameters()):
                    parameter.add_((rank - 0.5 * k) / 10)
            for own, simulated in self._pairs():
                own.copy_(simulated)

    def step(self) -> None:
        inputs = [next(inputs) for inputs in self._inputs]
        self._optimizer.zero_grad()
        self.ddp(inputs[self._rank]).square().mean().backward()
        self._optimizer.step()
        self.simulator.step([model(x) for model, x in zip(self.models, inputs, strict=True)])
        self.compare()

    def compare(self) -> None:
        for own, simulated in self._pairs():
            torch.testing.assert_close(own, simulated, **self._tolerance)
            torch.testing.assert_close(own.grad, simulated.grad, **self._tolerance)
        counts = self.handle.num_steps, self.handle.num_communications
        assert counts == (self.simulator.num_steps, self.simulator.num_communications)

    def _pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        simulated = self.models[self._rank].parameters()
        return zip(self.model.parameters(), simulated, strict=True)
