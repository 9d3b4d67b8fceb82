"""`QAdam`: Adam whose momenta are averaged with one byte per element, after a warm-up.

Source: QAdam as in Bagua (Gan et al., arXiv 2107.01499), after 1-bit Adam (Tang et al., arXiv
2102.02888). docs/algorithms.md lists the differences from Bagua.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adam import adam

from ddpopt import _torch
from ddpopt.algorithms.algorithm import HierarchicalAlgorithm, check_count
from ddpopt.algorithms.bytegrad import average_in_8_bits
from ddpopt.algorithms.handle import BackgroundHandle, Bucket, GradientFuture
from ddpopt.algorithms.training import Training
from ddpopt.errors import AttachError, OptionError
from ddpopt.ranks.agree import communicating


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam with a variance that is frozen after a warm-up; `QAdam` needs it.

    For the first `warmup_steps` updates of a parameter it is `torch.optim.Adam`. After that, with
    momentum m, variance v and W = `warmup_steps`, update t is
    m <- b1 m + (1 - b1) (g + weight_decay p) and
    p <- p - lr m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^W) + eps),
    where the factor of lr is clamped to the bound that Adam's paper gives for it (Kingma & Ba,
    section 2.1): 1, or (1 - b1) / sqrt(1 - b2) if that is more.
    With `QAdam` attached, `p.grad` is m, averaged over all ranks, from backward to `zero_grad`.
    `warmup_steps` is at least 1; all other arguments are as for Adam, `weight_decay` an L2 penalty.

    Raises:
        OptionError: a value is out of range.
        TypeError: `warmup_steps` is not an int.
    """

    # Makes GradScaler leave the scale to this optimizer, so that `step` notices its use.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        # Parameters whose `grad` is their next momentum, until `step` has used it or `zero_grad`.
        self._with_momentum: set[torch.Tensor] = set()
        defaults = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        _check_settings(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with settings of their own; raises as the constructor does."""
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Run by `load_state_dict`, and for a copy: gradients that are there then are gradients."""
        super().__setstate__(state)
        self._with_momentum = set()

    def num_updates(self, parameter: torch.Tensor) -> int:
        """How many updates of a parameter were made."""
        state: dict[str, Any] = self.state.get(parameter, {})
        return int(state["step"].item()) if state else 0

    def is_warm(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter of this group has had its warm-up."""
        return _ends_warmup(self.num_updates(parameter), group)

    @torch.no_grad()
    def turn_into_momentum(
        self, gradient: torch.Tensor, parameter: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Turn a warm parameter's gradient into its next momentum, in place.

        Raises:
            OptionError: the gradient was added to a momentum, which is no gradient.
        """
        if parameter in self._with_momentum:
            raise OptionError(
                "a second backward added gradients to QAdam's momentum; accumulate under "
                "ddp.no_sync(), and call zero_grad() of the optimizer where step() is left out"
            )
        self._with_momentum.add(parameter)
        gradient.copy_(self._next_momentum(gradient, parameter, group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._with_momentum.clear()

    @torch.no_grad()
    @_torch.calls_users_code  # the closure, which Dynamo may compile
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # one signature for torch's two
        """Update the parameters.

        Raises:
            OptionError: GradScaler is in use.
            NotImplementedError: a gradient is sparse.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        if hasattr(self, "found_inf"):  # GradScaler.step has set it
            raise OptionError(
                "QAdam cannot work with GradScaler: momenta of steps with different scales would "
                "be mixed; use bfloat16 autocast, which needs none"
            )
        for group in self.param_groups:
            cold, warm = [], []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if self.is_warm(parameter, group):
                    warm.append(parameter)
                else:
                    cold.append(parameter)
            self._update_by_adam(cold, group)
            for parameter in warm:
                self._update(parameter, group)
        self._with_momentum.clear()
        return loss

    def _next_momentum(self, gradient: torch.Tensor, parameter: Any, group: dict[str, Any]) -> Any:
        """b1 m + (1 - b1) (g + weight_decay p)."""
        decayed = gradient.add(parameter, alpha=group["weight_decay"])
        return self.state[parameter]["exp_avg"].lerp(decayed, 1 - group["betas"][0])

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        """Update a parameter after its warm-up, with the variance from the end of that."""
        beta1, beta2 = group["betas"]
        state, momentum = self.state[parameter], parameter.grad
        if parameter not in self._with_momentum:  # `grad` is a gradient, as without `QAdam`
            momentum = self._next_momentum(momentum, parameter, group)
        state["exp_avg"].copy_(momentum)
        state["step"] += 1
        correction1 = 1 - beta1 ** state["step"].item()
        correction2 = 1 - beta2 ** group["warmup_steps"]
        denominator = (state["exp_avg_sq"].sqrt() / correction2**0.5).add_(group["eps"])
        # Adam's own largest step, as a factor of lr. Without that bound a parameter whose gradients
        # were 0 throughout the warm-up would take a huge one: the denominator is only eps.
        bound = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
        update = (momentum / denominator).div_(correction1).clamp_(-bound, bound)
        parameter.sub_(update, alpha=group["lr"])

    def _update_by_adam(self, parameters: list[Any], group: dict[str, Any]) -> None:
        """Update parameters that are not warm yet, as torch.optim.Adam does."""
        if any(parameter.grad.is_sparse for parameter in parameters):
            raise NotImplementedError(
                "QAdam takes no sparse gradients; make the embedding with sparse=False"
            )
        gradients, averages, squares, steps = [], [], [], []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
            averages.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            steps.append(state["step"])
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            gradients,
            averages,
            squares,
            [],  # the maxima of squares, for amsgrad
            steps,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def _ends_warmup(num_updates: int, group: dict[str, Any]) -> bool:
    """Whether a parameter of this group is warm after so many updates."""
    return num_updates >= int(group["warmup_steps"])


def _check_settings(settings: dict[str, Any]) -> None:
    """Raise unless a parameter group may have these settings."""
    check_count("warmup_steps", settings["warmup_steps"], 1)
    # `lr` may be a tensor, as Adam's may. A NaN is not at least 0 either.
    for name in ("lr", "eps", "weight_decay"):
        if not settings[name] >= 0:
            raise OptionError(f"{name} is {settings[name]}; it must be 0 or more")
    betas = settings["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise OptionError(f"betas is {betas}; give two numbers of at least 0 and below 1")


class QAdamHandle(BackgroundHandle):
    """As `Handle`. When a step begins, ranks compare how often they have updated which parameter.

    If one of them has left out an update alone, it would reduce whole gradients where others, whose
    warm-up is over, reduce momenta, and all would wait for each other. So before a step's first
    bucket all of them know, and all raise.
    """

    averages_weights = False

    def __init__(self, training: Training, algorithm: QAdam) -> None:
        super().__init__(training, algorithm)
        # Parameters that were warm when the step began, with their optimizer and its group.
        self._warm: dict[torch.Tensor, tuple[QAdamOptimizer, dict[str, Any]]] = {}
        # For each rank the sum of its parameters' updates, and a digest of which were made; None
        # once that was compared.
        self._updates_of_ranks: torch.futures.Future[list[list[int]]] | None = None
        # Why this step's buckets are not reduced.
        self._disagreement: Exception | None = None

    def begin_step(self) -> None:
        # All buckets of a step have the same warm parameters.
        self._warm = {}
        # Both have to be equal on all ranks: by another warmup_steps others would be warm.
        counts: list[int] = []
        are_warm: list[bool] = []
        for optimizer in self.training.optimizers:
            if not isinstance(optimizer, QAdamOptimizer):
                continue  # which `QAdam.check` refuses, but a subclass may allow
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in self.training.parameters:
                        continue  # each rank may have its own, which DDP ignores
                    num_updates = optimizer.num_updates(parameter)
                    counts.append(num_updates)
                    are_warm.append(_ends_warmup(num_updates, group))
                    if are_warm[-1]:
                        self._warm[parameter] = (optimizer, group)
        digest = zlib.crc32(repr((counts, are_warm)).encode())
        own = torch.tensor([sum(counts), digest], device="cpu")

        def collect() -> list[list[int]]:
            assert self.groups.agreement is not None
            rows, work = self.groups.agreement.collect(own)
            work.wait()
            of_ranks: list[list[int]] = rows.tolist()
            return of_ranks

        self._disagreement = None
        self._updates_of_ranks = self.worker.submit(collect)  # behind forward

    def reduce(self, bucket: Bucket) -> GradientFuture:
        # DDP reduces under `no_sync` too where a forward before it, such as an evaluation without
        # `no_grad`, had no backward. The bucket is of no step: `allreduce` would count it for one.
        if self.is_paused or not _torch.syncs_gradients(self.training.ddp):
            return self.groups.ddp.mean_bucket(bucket)
        # From here on the bucket is one of a step.
        self._compare_updates()
        if self._disagreement is not None:
            self._failure = self._disagreement  # which the end of backward raises
            return super().reduce(bucket)  # which changes nothing
        warm = []
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            if parameter in self._warm:
                optimizer, group = self._warm[parameter]
                warm.append((gradient, parameter, optimizer, group))
        if not warm:
            self.num_communications += 1
            return self.allreduce(bucket)

        def average_momenta(values: torch.Tensor) -> None:
            for gradient, parameter, optimizer, group in warm:
                optimizer.turn_into_momentum(gradient, parameter, group)
            average_in_8_bits(values, self.groups, self.num_steps)

        return self.run_behind_backward(bucket, average_momenta)

    def _compare_updates(self) -> None:
        """Find out, once a step, whether all ranks have made the same updates."""
        future, self._updates_of_ranks = self._updates_of_ranks, None
        if future is None:
            return
        try:
            with communicating(f"comparing the updates before step {self.num_steps}"):
                first, *others = future.wait()
        except Exception as error:
            # Whatever a collective raised: DDP would show it without its type.
            self._disagreement = error
            return
        for rank, row in enumerate(others, 1):
            if row != first:
                self._disagreement = AttachError(
                    f"before step {self.num_steps} QAdamOptimizer had made other updates on rank "
                    f"{rank} than on rank 0 ({row[0]} and {first[0]}, counted for each parameter): "
                    "weights differ, and the warm-up would end in different steps; leave out "
                    "step() on all ranks or on none, with one warmup_steps; to go on, call "
                    "detach(average=False) and attach again, which sends what rank 0 has"
                )
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class QAdam(HierarchicalAlgorithm[QAdamHandle]):
    """Averages gradients until `QAdamOptimizer`'s warm-up ends, then momenta in 8 bits.

    During the warm-up gradients are averaged as DDP does. After that each rank computes its next
    momentum from its own gradient, behind backward, and momenta are averaged as `ByteGrad` averages
    gradients. Momenta change more slowly, so less is lost to rounding.

    Attributes:
        hierarchical: After the warm-up, average within each node first, uncompressed.
    """

    handle_type = QAdamHandle
    agrees_on_cpu = True

    def check(self, training: Training) -> None:
        for optimizer in training.optimizers:
            if not isinstance(optimizer, QAdamOptimizer):
                raise OptionError(
                    f"QAdam cannot work with {type(optimizer).__name__}; give attach a "
                    "ddpopt.algorithms.QAdamOptimizer, or use ByteGrad with any optimizer"
                )
        if training.ddp.find_unused_parameters:
            raise OptionError(
                "QAdam cannot work with find_unused_parameters=True: a parameter that no rank "
                "used keeps an old gradient, which would be taken as its momentum; use all "
                "parameters in each step, or ByteGrad"
            )
