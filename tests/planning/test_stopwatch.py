"""Steps are timed to the end of the outermost backward."""

from __future__ import annotations

from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt import _torch
from ddpopt.errors import TorchDriftError
from ddpopt.planning import stopwatch
from ddpopt.steps import clock as clocks
from tests.support.fake_clock import FakeClock
from tests.support.models import MLP, WIDTH


def test_an_iteration_is_a_forward_a_backward_and_what_lies_between(one_rank: None) -> None:
    """Backward begins where forward ends, though a loss may be computed before it."""
    ddp, clock = DistributedDataParallel(MLP(2)), FakeClock()
    with clock.replacing_time_of(clocks):
        watch = stopwatch.Stopwatch(ddp, num_untimed=1)
        for _ in range(7):
            watch.begin_forward()
            clock.pass_time(1)
            output = ddp(torch.ones(4, WIDTH))
            watch.end_forward()
            clock.pass_time(2)
            output.sum().backward()
            clock.pass_time(4)
        measured = watch.measured()
    watch.stop()
    assert (measured.forward_s, measured.backward_s, measured.between_s) == (1, 2, 4)
    assert set(measured.ready_s) == {2}
    assert measured.iteration_s == 7


def test_a_name_that_torch_has_moved_is_a_problem_and_no_error(one_rank: None) -> None:
    """The other ranks wait for what this one has measured."""
    ddp = DistributedDataParallel(MLP(2))
    watch = stopwatch.Stopwatch(ddp, num_untimed=1)
    error = TorchDriftError("moved")
    with mock.patch.object(_torch, "final_buckets", side_effect=error):
        assert watch.measured() == stopwatch.Measured(problem="moved")
    watch.stop()


def test_a_forward_that_runs_its_backward_ends_with_the_first_gradient(one_rank: None) -> None:
    """So Lightning's manual optimization runs; the rest is backward's, or between steps."""
    ddp, clock = DistributedDataParallel(MLP(2)), FakeClock()
    with clock.replacing_time_of(clocks):
        watch = stopwatch.Stopwatch(ddp, num_untimed=1)
        for _ in range(7):
            watch.begin_forward()
            clock.pass_time(1)
            output = ddp(torch.ones(4, WIDTH))
            output.register_hook(lambda _: clock.pass_time(2))
            hook = ddp.module.layers[0].weight.register_hook(lambda _: clock.pass_time(4))
            output.sum().backward()
            hook.remove()
            clock.pass_time(8)
            watch.end_forward()
        measured = watch.measured()
    watch.stop()
    assert (measured.forward_s, measured.backward_s, measured.between_s) == (3, 4, 8)
    assert min(measured.ready_s) == 0


class _Checkpointed(MLP):
    """Two layers have backwards of their own in the backward; each takes a second."""

    clock: FakeClock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda _: self.clock.pass_time(1))
        for layer in self.layers[:2]:
            x = checkpoint(layer, x, use_reentrant=True)
            x.register_hook(lambda _: self.clock.pass_time(1))
        return self.layers[2](x)


def test_a_backward_is_measured_to_its_end_and_no_further(one_rank: None) -> None:
    """It includes the backwards within it, and none that follows in the same step."""
    clock = FakeClock()
    model = _Checkpointed(3)
    model.clock = clock
    ddp = DistributedDataParallel(model)
    with clock.replacing_time_of(clocks):
        watch = stopwatch.Stopwatch(ddp, num_untimed=0)
        for _ in range(7):
            watch.begin_forward()
            output = ddp(torch.ones(4, WIDTH, requires_grad=True))
            watch.end_forward()
            output.sum().backward()
            assert watch.num_backwards == len(watch.steps)
            model(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
            with ddp.no_sync():
                watch.skip_forward()
                model.layers[0](torch.ones(4, WIDTH)).sum().backward()
        measured = watch.measured()
    watch.stop()
    assert (measured.backward_s, measured.between_s) == (3, 3)
    assert measured.ready_s == (0, 0, 1, 1, 2, 2)


def test_a_key_is_of_one_stopwatch_from_its_first_backward_on(one_rank: None) -> None:
    """Ranks meet under it; those of the stopwatches before are used up."""
    ddp, keys = DistributedDataParallel(MLP(2)), []
    for _ in range(2):
        watch = stopwatch.Stopwatch(ddp, num_untimed=0)
        assert not watch.key
        for _ in range(3):
            watch.begin_forward()
            ddp(torch.ones(4, WIDTH)).sum().backward()
            keys.append(watch.key)
        watch.stop()
    assert keys == [keys[0]] * 3 + [keys[3]] * 3
    assert keys[0] != keys[3]
    assert all(keys)
