"""Dynamo's graphs, also where a release of torch gives them no marks."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from ddpopt import _torch
from ddpopt._torch import names
from ddpopt.errors import TorchDriftError
from tests.support.graphs import Capture
from tests.support.models import MLP


def test_a_graph_without_the_marks_that_dynamo_gives_each_is_drift() -> None:
    """Where nobody has traced it again: then it is none of Dynamo's."""
    capture = Capture()
    torch.compile(MLP(1), backend=capture)(torch.ones(2, 64))
    gm = capture.gm
    _torch.check_dynamo_graph(gm)
    for row, metas in (
        (names.EXAMPLE_VALUE, [node.meta for node in gm.graph.nodes]),
        (names.COMPILE_ID, [gm.meta]),
    ):
        values = [meta.pop(row.text, None) for meta in metas]
        with pytest.raises(TorchDriftError, match=row.text):
            _torch.check_dynamo_graph(gm)
        for meta, value in zip(metas, values, strict=True):
            meta[row.text] = value
    _torch.check_dynamo_graph(fx.GraphModule(nn.Module(), fx.Graph()))
