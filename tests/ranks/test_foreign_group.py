"""A DDP module on a process group that torch.distributed did not make, as torchft's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.errors import OptionError
from ddpopt.planning import tuner
from ddpopt.split import state
from tests.support.beside import compiled
from tests.support.cuts import only_cut
from tests.support.models import MLP, assert_equal_states, batches, train


class _Done(dist._Work):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class _Alone(dist.ProcessGroup):
    """Rank 0 of 1, without a name, a store or a backend."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._works: list[_Done] = []  # which live until somebody has waited

    def _end(self, result: Any) -> _Done:
        self._works.append(_Done(result))
        return self._works[-1]

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        for parts, own in zip(outputs[0], inputs, strict=True):
            parts.copy_(own)
        return self._end(outputs)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Done:
        return self._end(tensors)

    @torch.compiler.disable  # Dynamo would look at it where DDP rebuilds its buckets
    def broadcast(self, tensors: Any, opts: Any = None) -> _Done:
        return self._end(tensors)

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:  # noqa: N802  # torch's
        return "alone"


def _average(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.usefixtures("one_rank")
def test_a_group_that_is_not_torchs_trains_and_is_refused_only_where_ranks_would_meet() -> None:
    """Training is eager too, once our backend is loaded. A comm hook with a state communicates."""
    inputs = batches(0, [(8, 64)] * 4)
    states = []
    for options in (None, {}, {"buckets": "auto"}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        ddp = DistributedDataParallel(
            MLP(), process_group=_Alone(), bucket_cap_mb=0.03, broadcast_buffers=False
        )
        ddp.register_comm_hook(object(), _average)
        model = None if options is None else compiled(ddp, **options)
        states.append(train(ddp, inputs, model))
    assert_equal_states(states[1], states[0])
    assert_equal_states(states[2], states[0])
    assert len(only_cut(ddp).sections) > 1
    search = tuner.find_tuner(state.ddp_of(ddp))
    assert search is not None
    assert search.is_done
    for call in (ddpopt.warmup, ddpopt.verify):
        with pytest.raises(OptionError, match="_Alone, is not one that"):
            call(model, inputs[0])
