"""`QAdam`: Adam whose momenta are averaged with one byte per element, after a warm-up.

Source: QAdam as in Bagua (Gan et al., arXiv 2107.01499), after 1-bit Adam (Tang et al., arXiv
2102.02888). docs/algorithms.md lists the differences from Bagua.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adam import adam

from ddpopt import _torch
from ddpopt.algorithms import handle
from ddpopt.algorithms.bytegrad import average_in_8_bits
from ddpopt.errors import OptionError


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
        handle.check_count("warmup_steps", warmup_steps, 1)
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise OptionError(f"{name} is {value}; the least is 0")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise OptionError(f"betas is {betas}; give two numbers of at least 0 and below 1")
        self._with_momentum: set[torch.Tensor] = set()  # parameters whose `grad` is their momentum
        rates = {"lr": lr, "warmup_steps": warmup_steps, "betas": betas}
        super().__init__(params, {**rates, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._with_momentum = set()

    def is_warm(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        state: dict[str, Any] = self.state.get(parameter, {})
        return bool(state) and bool(state["step"].item() >= group["warmup_steps"])

    @torch.no_grad()
    def turn_into_momentum(
        self, gradient: torch.Tensor, parameter: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Turn a warm parameter's gradient into its next momentum; OptionError if added to one."""
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
    @_torch.calls_users_code  # the closure
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # one signature for torch's two
        """Update the parameters.

        Raises:
            OptionError: GradScaler is in use.
            NotImplementedError: a gradient is sparse.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        if hasattr(self, "found_inf"):
            raise OptionError(
                "QAdam cannot work with GradScaler: momenta of steps with different scales would "
                "be mixed; use bfloat16 autocast, which needs none"
            )
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            warm = [p for p in parameters if self.is_warm(p, group)]
            self._update_by_adam([p for p in parameters if not self.is_warm(p, group)], group)
            for parameter in warm:
                self._update(parameter, group)
        self._with_momentum.clear()
        return loss

    def _next_momentum(self, gradient: torch.Tensor, parameter: Any, group: dict[str, Any]) -> Any:
        decayed = gradient.add(parameter, alpha=group["weight_decay"])
        return self.state[parameter]["exp_avg"].lerp(decayed, 1 - group["betas"][0])

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state, momentum = self.state[parameter], parameter.grad
        if parameter not in self._with_momentum:
            momentum = self._next_momentum(momentum, parameter, group)
        state["exp_avg"].copy_(momentum)
        state["step"] += 1
        correction1 = 1 - beta1 ** state["step"].item()
        correction2 = 1 - beta2 ** group["warmup_steps"]
        denominator = (state["exp_avg_sq"].sqrt() / correction2**0.5).add_(group["eps"])
        # If gradients were 0 throughout the warm-up, the denominator is only eps.
        bound = max(1.0, (1 - beta1) / (1 - beta2) ** 0.5)
        update = (momentum / denominator).div_(correction1).clamp_(-bound, bound)
        parameter.sub_(update, alpha=group["lr"])

    def _update_by_adam(self, parameters: list[Any], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters]
        if any(gradient.is_sparse for gradient in gradients):
            raise NotImplementedError(
                "QAdam takes no sparse gradients; make the embedding with sparse=False"
            )
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"step": torch.tensor(0.0)}
                self.state[p] |= {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        states, names = [self.state[p] for p in parameters], ("exp_avg", "exp_avg_sq", "step")
        averages, squares, steps = ([state[name] for state in states] for name in names)
        beta1, beta2 = group["betas"]
        options = {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
        options |= {name: group[name] for name in ("lr", "weight_decay", "eps")}
        adam(parameters, gradients, averages, squares, [], steps, **options)


class QAdamHandle(handle.BackgroundHandle):
    def __init__(self, training: handle.Training, algorithm: QAdam) -> None:
        super().__init__(training, algorithm)
        self._warm: dict[torch.Tensor, tuple[QAdamOptimizer, dict[str, Any]]] = {}

    def reduce(self, bucket: handle.Bucket) -> handle.GradientFuture:
        pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
        warm = [(gradient, p, *self._warm[p]) for gradient, p in pairs if p in self._warm]
        if not warm:
            self.num_communications += 1
            return self.allreduce(bucket)

        def average_momenta(values: torch.Tensor) -> None:
            for gradient, parameter, optimizer, group in warm:
                optimizer.turn_into_momentum(gradient, parameter, group)
            average_in_8_bits(values, self.groups, self.num_steps)

        return self.run_behind_backward(bucket, average_momenta)

    def begin_step(self) -> None:
        self._warm = {
            parameter: (optimizer, group)
            for optimizer in self.training.optimizers
            if isinstance(optimizer, QAdamOptimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if optimizer.is_warm(parameter, group)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QAdam(handle.HierarchicalAlgorithm[QAdamHandle]):
    """Averages gradients until `QAdamOptimizer`'s warm-up ends, then momenta in 8 bits.

    During the warm-up gradients are averaged as DDP does. After that each rank computes its next
    momentum from its own gradient, behind backward, and momenta are averaged as `ByteGrad` averages
    gradients. Momenta change more slowly, so less is lost to rounding.

    Attributes:
        hierarchical: After the warm-up, average within each node first, uncompressed.
    """

    handle_type = QAdamHandle

    def check(self, training: handle.Training) -> None:
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
