"""A checkpoint recomputes a compiled region with the code of its forward (`split/runner.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt.split import forward
from tests.support.models import assert_equal_states, state_of

WIDTH = 16


class _Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(torch.tanh(x), self.weight, self.bias))


class _Pair(nn.Module):
    """Two layers in two buckets; where it `breaks`, its data decide, which Dynamo cannot trace."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(WIDTH, WIDTH), _Layer(WIDTH, WIDTH)])
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:  # Dynamo gives up a function that breaks in a loop
            x = layer(x)
            if self.breaks and x.sum() > 1000:
                x = x * 2
        return x


def _activate(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.sin(x) * x)


class _PairOfWeights(_Pair):
    """The only part that Dynamo compiles of one that `breaks` has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _activate(x @ layer.weight)
            if self.breaks and x.sum() > 1000:
                x = x * 2
        return x


class _Layers(nn.Module):
    def __init__(self, pair: type[_Pair], stem: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.pairs = nn.ModuleList([pair(False), pair(True)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for pair in self.pairs:
            x = checkpoint(pair.__call__, x, use_reentrant=False)
        return x


def _step(
    compiled: slice, pair: type[_Pair] = _Pair, stem: nn.Module | None = None
) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = _Layers(pair, stem or nn.Identity())
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.001)
    for compiled_pair in layers.pairs[compiled]:
        compiled_pair.compile(backend="ddpopt", options={"inner": "aot_eager"})
    ddp(torch.randn(WIDTH, WIDTH)).square().sum().backward()
    return ddp


@pytest.mark.parametrize("pair", [_Pair, _PairOfWeights])
@pytest.mark.parametrize("has_stem", [False, True])
def test_a_recomputation_by_other_frames_than_the_forwards_is_refused(
    one_rank: None, pair: type[_Pair], has_stem: bool
) -> None:
    """Layers share `nn.Module.__call__`, which Dynamo gives up when one breaks the graph.

    Behind a stem both pairs get inputs of one kind, so that the second one's forward has compiled
    all parts that the recomputation of the first needs.
    """
    with pytest.raises(BackendCompilerFailed, match="RecomputationError"):
        _step(slice(None), pair, nn.Linear(WIDTH, WIDTH) if has_stem else None)


class _Flagged(_Pair):
    """Looks at an attribute on which nothing depends, and which Dynamo guards."""

    def __init__(self) -> None:
        super().__init__(False)
        self.is_flagged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_flagged:
            pass
        return super().forward(x)


def _step_with_a_flag(is_compiled: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Flagged())
    ddp = DistributedDataParallel(_Checkpointed(model), bucket_cap_mb=0.001)
    if is_compiled:
        model[1].compile(backend="ddpopt", options={"inner": "aot_eager"})
    loss = ddp(torch.randn(WIDTH, WIDTH)).square().sum()
    model[1].is_flagged = True
    loss.backward()
    return ddp


class _Checkpointed(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_recomputation_may_compile_a_frame_of_the_forward_anew(one_rank: None) -> None:
    """One of the model's own guards fails there; the code saves what the forward's has saved."""
    eager, ddp = _step_with_a_flag(False), _step_with_a_flag(True)
    assert [len(cut.sections) for cut in ddpopt.explain(ddp).cuts] == [2, 2]
    assert_equal_states(state_of(ddp), state_of(eager))


def test_gradients_are_right_where_the_layer_that_breaks_the_graph_is_not_compiled(
    one_rank: None,
) -> None:
    """The message of the refusal advises it."""
    eager, ddp = _step(slice(0)), _step(slice(1))
    assert [len(cut.sections) for cut in ddpopt.explain(ddp).cuts] == [2]
    assert_equal_states(state_of(ddp), state_of(eager))


class _Scaled(nn.Module):
    """A residual block of three layers in three buckets, scaled by the length of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A number in the first block's code, a symbol in the second's.
        scale = x.shape[1] ** -0.5
        y = x * scale
        for layer in self.layers:
            y = layer(y)
        return x + y * scale


class _Shortened(nn.Module):
    """Two checkpointed blocks of one class, of which the second gets every other position."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(_Scaled() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)[:, ::2].contiguous()
        return x


def _step_on_sequence(split: str | None) -> DistributedDataParallel:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_Shortened(), bucket_cap_mb=0.0005)
    if split is not None:
        for block in ddp.module.blocks:
            block.compile(backend="ddpopt", options={"inner": "aot_eager", "split": split})
    ddp(torch.randn(4, 32, WIDTH)).square().sum().backward()
    return ddp


@pytest.mark.quick("forward")
@pytest.mark.parametrize("split", ["forward", "auto"])
def test_a_block_is_recomputed_by_the_version_that_its_forward_ran(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """The second block's version, for any length, would fit the first block too.

    Dynamo offers it first, since it ran last. With `split="forward"` it is whole and saves fewer
    tensors than the first block's, which is cut.
    """
    # So that no cut can pass on the symbol.
    monkeypatch.setattr(forward, "_compute_again_for_each_user", lambda _: None)
    eager, ddp = _step_on_sequence(None), _step_on_sequence(split)
    num_sections = [len(cut.sections) for cut in ddpopt.explain(ddp).cuts]
    assert len(num_sections) == 2
    assert num_sections == [3, 0] or split == "auto"
    assert_equal_states(state_of(ddp), state_of(eager))
