"""DDP without processes: plans and splits of a module in one process, in milliseconds.

As `DistributedDataParallel`, but nothing is communicated: it has what ddpopt reads off a DDP
module, and is active while its forward runs.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.meetings.measuring import FakeGroup
from ddpopt.split import state
from ddpopt.split.cut import Cut
from tests.support.cuts import only_cut

_MIB = 1024 * 1024


class FakeDDP(DistributedDataParallel):
    """Takes DDP's options for buckets; all others are of no use here."""

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: tuple[float, ...] = (),
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.bucket_bytes_cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * _MIB)
        self.bucket_bytes_cap_default = bucket_cap_mb is None
        self.bucket_bytes_cap_list = [int(cap * _MIB) for cap in bucket_cap_mb_list]
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._delay_all_reduce_params: list[nn.Parameter] = []
        self.require_backward_grad_sync = True
        self.process_group = FakeGroup(0, 1)
        state.get(self).is_copy = True  # there are no ranks to agree with
        self._has_rebuilt_buckets = True
        self._use_python_reducer = False
        self._module_parameters = [
            parameter
            for name, parameter in module.named_parameters()
            if name not in self.parameters_to_ignore
        ]
        reduced = [parameter for parameter in self._module_parameters if parameter.requires_grad]
        bucket = mock.Mock(parameters=lambda: reduced)
        self.reducer = mock.Mock(_get_zeros_like_grad_buckets=lambda: [bucket])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._run_ddp_forward(*inputs, **kwargs)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"has_rebuilt_buckets": 1}


def cut_of(module: nn.Module, *inputs: Any, **ddp_options: Any) -> Cut:
    """The cut of a module whose forward is one graph."""
    torch._dynamo.reset()
    ddp = FakeDDP(module, **ddp_options)
    torch.compile(ddp, backend="ddpopt", options={"inner": "eager"})(*inputs)
    return only_cut(ddp)
