"""Options of torch.compile: defaults, precedence, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel

from ddpopt import config
from ddpopt.errors import OptionError
from ddpopt.options import resolve_options
from tests.support.models import MLP


def test_the_most_specific_setting_wins() -> None:
    """An option goes before config, and config before the default."""
    assert resolve_options(None, None).enabled
    assert resolve_options(None, None).split == "auto"
    with config.patch(enabled=False):
        assert not resolve_options(None, {}).enabled
        assert resolve_options(None, {"enabled": True}).enabled


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        (
            None,
            {"innner": "eager"},
            r"'innner'; did you mean 'inner'\?$",
        ),
        (None, {"max_autotun": True}, "did you mean 'max_autotune'"),
        (None, {"zzz": 1}, r"\['buckets', .*'split'\], and Inductor's those of"),
        (None, {1: True}, "unknown option 1; ddpopt's own"),
        (None, {1: True, "inner": "eager"}, r"\[1\].*only Inductor"),
        (None, "split=forward", "'split=forward', a str; give a dict"),
        (None, {"max_autotune": "yes"}, "max_autotune.*str should be bool"),
        ("fastest", None, "mode 'fastest'"),
        (None, {"enabled": 1}, "'enabled' is 1, a int"),
        (
            None,
            {"split": "sideways"},
            r"'sideways'; valid values are \['auto', 'backward', 'forward'\]",
        ),
        (None, {"inner": "gcc"}, "'gcc', which is no backend.*'aot_eager'"),
        (None, {"inner": 3}, "'inner' is 3, a int"),
        (None, {"inner": "ddpopt"}, "compile with itself"),
        (None, {"inner": "eager", "max_autotune": True}, r"\['max_autotune'\].*only Inductor"),
        ("max-autotune", {"inner": "eager"}, r"\['mode'\].*only Inductor"),
    ],
)
def test_bad_input_names_the_value_and_what_is_valid(
    mode: str | None, options: Any, message: str
) -> None:
    """An error can be acted on without reading the source."""
    with pytest.raises(OptionError, match=message):
        resolve_options(mode, options)


def test_modes_and_other_options_reach_inductor() -> None:
    """Options become Inductor's config patches, as torch.compile makes them."""
    resolved = resolve_options("max-autotune-no-cudagraphs", {"epilogue_fusion": False})
    assert resolved.inner.config["max_autotune"] is True
    assert resolved.inner.config["epilogue_fusion"] is False


def test_a_callable_is_an_inner_compiler(one_rank: None) -> None:
    """The callable gets each section with example inputs; what it returns runs."""
    seen: list[int] = []

    def count_nodes(gm: fx.GraphModule, example_inputs: list[object]) -> object:
        assert len(example_inputs) == len(gm.graph.find_nodes(op="placeholder"))
        seen.append(len(gm.graph.nodes))
        return gm.forward

    ddp = DistributedDataParallel(MLP(), bucket_cap_mb=0.03)
    torch.compile(ddp, backend="ddpopt", options={"inner": count_nodes})(torch.randn(2, 64))
    assert len(seen) == 3


def test_an_error_reaches_the_user_of_torch_compile(one_rank: None) -> None:
    """Dynamo wraps it and keeps its text."""
    compiled = torch.compile(
        DistributedDataParallel(MLP()), backend="ddpopt", options={"spilt": "forward"}
    )
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean 'split'"):
        compiled(torch.randn(2, 64))
