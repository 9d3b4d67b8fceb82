"""Facts read off DDP and its Reducer: parameter numbers, buckets, settings; and moved names."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._torch import names
from ddpopt.checks.copies import copy_model
from ddpopt.errors import TorchDriftError
from tests.support.beside import compiled
from tests.support.buckets import rebuilt_buckets
from tests.support.models import (
    CHANGES,
    MLP,
    WIDTH,
    batches,
    parametrize_all,
    prune_all,
    reorder,
    tie,
    train,
)


@pytest.mark.quick("_has_rebuilt_buckets")
@pytest.mark.parametrize("name", ["_has_rebuilt_buckets", "bucket_bytes_cap_list"])
def test_an_attribute_that_is_only_written_is_missed_too(
    one_rank: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Reducer stays where DDP cannot be told of another; no name is created."""
    ddp = DistributedDataParallel(MLP(1))
    before = ddp.reducer
    monkeypatch.delattr(ddp, name)  # until the test ends: later tests may find the module
    with pytest.raises(TorchDriftError, match=f"DistributedDataParallel.{name}, which"):
        _torch.replace_reducer(ddp, [[0], [1]], [1, 1])
    assert not hasattr(ddp, name)
    assert ddp.reducer is before


def test_a_function_of_a_module_that_moved_is_not_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block that would replace it raises, and leaves the module without the name."""
    monkeypatch.delattr("torch.distributed.distributed_c10d._process_group_name")
    with (
        pytest.raises(TorchDriftError, match="_process_group_name"),
        _torch.making_groups_apart("mine"),
    ):
        pass
    assert not hasattr(torch.distributed.distributed_c10d, "_process_group_name")


# ---- Parameters that are registered otherwise once DDP was made ---------------------------------


each_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
STATIC = {"static_graph": True, "bucket_cap_mb": 0.01}
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": 0.01}


class _Mixed(MLP):
    """One of its layers has another dtype."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[1].double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def _ids(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [id(tensor) for tensor in tensors]


def _buckets_by_tensor(ddp: DistributedDataParallel) -> list[list[int]]:
    """The same buckets, with the numbers that ddpopt gives to their parameters."""
    numbers = {tensor: p.index for tensor, p in _torch.reducer_parameters(ddp).items()}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[numbers[tensor] for tensor in bucket.parameters()] for bucket in buckets]


@pytest.mark.quick("known before-at first-tie")
@each_change
@pytest.mark.parametrize("num_before", [0, 4], ids=["at first", "after four steps"])
@pytest.mark.parametrize("is_asked_before", [True, False], ids=["known before", "unknown"])
def test_parameters_have_the_reducers_numbers_whatever_the_module_has_become(
    one_rank: None, change: Callable[[MLP], None], num_before: int, is_asked_before: bool
) -> None:
    """DDP's log has the same numbers; names stay what they were when they were first asked for."""
    ddp = DistributedDataParallel(MLP(4), **STATIC)
    names_before = [name for name, _ in ddp.module.named_parameters()]
    tensors_before = list(ddp.module.parameters())
    inputs = batches(0, [(2, WIDTH)] * 4)
    if num_before and change in (tie, parametrize_all):
        pytest.skip("DDP's static graph may not lose parameters once it has run")
    if num_before:
        train(ddp, inputs[:num_before])
    if is_asked_before:
        _torch.reducer_parameters(ddp)
    change(ddp.module)
    reduced = _torch.reducer_parameters(ddp)
    assert _ids(reduced) == _ids(tensors_before)
    assert [p.index for p in reduced.values()] == list(range(8))
    if is_asked_before:
        assert [p.name for p in reduced.values()] == names_before
    assert len({p.name for p in reduced.values()}) == 8
    train(ddp, inputs)
    assert _buckets_by_tensor(ddp) == rebuilt_buckets(ddp)
    assert _torch.final_buckets(ddp) == tuple(map(tuple, rebuilt_buckets(ddp)))


@pytest.mark.quick("tie")
@each_change
def test_buckets_that_are_never_rebuilt_have_the_reducers_numbers_too(
    one_rank: None, change: Callable[[MLP], None]
) -> None:
    """Such buckets are formed in order of registration, from last to first."""
    ddp = DistributedDataParallel(MLP(4), **UNUSED)
    change(ddp.module)
    buckets = _torch.final_buckets(ddp)
    assert len(buckets) > 1
    assert sorted(index for bucket in buckets for index in bucket) == list(range(8))
    assert [list(bucket) for bucket in buckets] == _buckets_by_tensor(ddp)
    assert [bucket[0] for bucket in buckets] == sorted((b[0] for b in buckets), reverse=True)


@pytest.mark.quick("deepcopy-tie")
@each_change
@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
def test_a_copy_is_numbered_as_its_own_reducer_was_made(
    one_rank: None, change: Callable[[MLP], None], copy_of: Callable[[Any], Any]
) -> None:
    """The module counts as it was then; DDP copies its list of parameters from the original."""
    original = DistributedDataParallel(MLP(4), **STATIC)
    change(original.module)
    if change is (prune_all if copy_of is copy.deepcopy else parametrize_all):
        pytest.skip("torch does not copy such a module in this way")
    ddp = copy_of(original)
    _torch.reducer_parameters(ddp)
    train(ddp, batches(0, [(2, WIDTH)] * 4))
    assert _buckets_by_tensor(ddp) == rebuilt_buckets(ddp)
    assert _ids(_torch.reducer_parameters(ddp)) == _ids(ddp._build_params_for_reducer()[0])


def test_a_new_reducer_and_a_compiled_copy_have_the_same_numbers_and_names(one_rank: None) -> None:
    ddp = DistributedDataParallel(MLP(4), **STATIC)
    before = _torch.reducer_parameters(ddp)
    tie(ddp.module)
    prune_all(ddp.module)
    _torch.replace_reducer(ddp, [[0, 1, 2], [3, 4, 5, 6, 7]], [1, 1])
    assert _torch.reducer_parameters(ddp) == before
    copied_ddp = copy_model(compiled(ddp, "eager")).ddp
    copies = _torch.reducer_parameters(copied_ddp)
    assert list(copies.values()) == list(before.values())
    assert not set(copies) & set(before)
    copied_parameters = dict(copied_ddp.module.named_parameters())
    for (tensor, p), copied in zip(before.items(), copies, strict=True):
        assert torch.equal(tensor, copied)
        if p.name == "layers.0.bias":
            assert copied_parameters["layers.0.bias"] is copied


def test_numbers_that_are_not_the_reducers_are_an_error_where_they_meet(one_rank: None) -> None:
    """The numbers meet where DDP's log has buckets by number, and the Reducer has their tensors."""
    ddp = DistributedDataParallel(_Mixed(), **STATIC)
    ddp._module_parameters.reverse()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ddp), "_build_params_for_reducer", lambda _: ([], []))
        with pytest.raises(TorchDriftError, match="another order"):
            _torch.reducer_parameters(ddp)
    ddp._module_parameters.reverse()
    _torch.reducer_parameters(ddp)
    train(ddp, batches(0, [(2, WIDTH)] * 4))
    with pytest.MonkeyPatch.context() as patch:
        log = {
            **ddp._get_ddp_logging_data(),
            "rebuilt_per_bucket_param_indices": "0, 7 6 5 4 3 2 1",
        }
        patch.setattr(type(ddp), names.GET_LOGGING_DATA.name, lambda _: log)
        with pytest.raises(TorchDriftError, match="its log"):
            _torch.final_buckets(ddp)


@pytest.mark.quick("tie")
@each_change
def test_parameters_of_several_dtypes_are_numbered_too(
    one_rank: None, change: Callable[[MLP], None]
) -> None:
    """Each dtype has a bucket of its own at first."""
    ddp = DistributedDataParallel(_Mixed(), **STATIC)
    expected = list(ddp.module.parameters())
    if change is not tie:
        change(ddp.module)
    assert _ids(_torch.reducer_parameters(ddp)) == _ids(expected)
    train(ddp, batches(0, [(2, WIDTH)] * 4))
    assert _buckets_by_tensor(ddp) == rebuilt_buckets(ddp)


def test_ignored_parameters_are_numbered_as_ddp_ignores_them(one_rank: None) -> None:
    """Torch 2.13 ignores none of the root itself, which DDP leaves out of its list all the same."""

    class Scaled(MLP):
        def __init__(self) -> None:
            super().__init__(3)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self._ddp_params_and_buffers_to_ignore = ["scale", "layers.2.bias"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    ddp = DistributedDataParallel(Scaled(), **STATIC)
    expected = ddp._build_params_for_reducer()[0]
    reorder(ddp.module)
    assert _ids(_torch.reducer_parameters(ddp)) == _ids(expected)
    train(ddp, batches(0, [(2, WIDTH)] * 4))
    assert _buckets_by_tensor(ddp) == rebuilt_buckets(ddp)


# ---- What a comm hook keeps ---------------------------------------------------------------------

# DDP refuses hooks whose annotations are strings. None of these is ever run.


def _reduce(kept, bucket):  # type: ignore[no-untyped-def]
    raise NotImplementedError


class _Compressor:
    def reduce(self, _state, bucket):  # type: ignore[no-untyped-def]
        return _reduce(self, bucket)


def _keeping(kept: Any) -> Any:
    def reduce(_state, bucket):  # type: ignore[no-untyped-def]
        return _reduce(kept, bucket)

    return reduce


def _having_each_other() -> Any:
    def reduce(_state, bucket):  # type: ignore[no-untyped-def]
        return again(bucket)

    def again(bucket: Any) -> Any:
        return reduce(None, bucket)

    return reduce


HOOKS: dict[str, tuple[Any, bool]] = {
    "method": (_Compressor().reduce, True),
    "closure": (_keeping({}), True),
    "closure in a closure": (_keeping(_keeping([])), True),
    "function": (_keeping(_reduce), False),
    "dtype": (_keeping(torch.float16), False),
    "each other": (_having_each_other(), False),
    "wrapper of torch's": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        False,
    ),
}


@pytest.mark.quick("method")
@pytest.mark.parametrize("name", HOOKS)
def test_a_comm_hooks_state_is_found_in_its_object_or_closure(one_rank: None, name: str) -> None:
    """A state may be kept by bucket, so a search leaves the buckets alone."""
    hook, is_stateful = HOOKS[name]
    ddp = DistributedDataParallel(MLP())
    ddp.register_comm_hook(None, hook)
    assert bool(_torch.hook_states(ddp)) == is_stateful


# ---- What a new Reducer has of the one before -------------------------------------------------


def test_of_each_setting_of_ddp_it_is_known_how_a_new_reducer_has_it() -> None:
    """A release that adds one fails here: `KNOWN_SETTINGS` says how a new Reducer has each."""
    unknown = set(_torch.ddp_settings()) - set(_torch.KNOWN_SETTINGS)
    assert not unknown, f"torch {torch.__version__} has {sorted(unknown)}"
    assert {"find_unused_parameters", "broadcast_buffers"} <= set(_torch.ddp_settings())


def test_what_a_program_keeps_of_a_modules_attributes_stays_as_it_is(one_rank: None) -> None:
    """Functions that `torch.compile` made have them too, and would keep the old Reducer alive."""
    ddp = DistributedDataParallel(MLP(1))
    kept, compiled = dict(vars(ddp)), torch.compile(ddp, backend="eager")
    _torch.replace_reducer(ddp, [[0], [1]], [1, 1])
    assert kept["reducer"] is not None
    assert kept["reducer"] is not ddp.reducer
    assert compiled._orig_mod is ddp


def _options_of_reducers() -> list[dict[str, Any]]:
    """All combinations of two of the options that DDP gives to its Reducer."""
    flags = [
        name
        for name, default in _torch.ddp_settings().items()
        if default is False and name not in ("check_reduction", "static_graph")
    ]
    return [dict.fromkeys(pair, True) for pair in itertools.combinations(flags, 2)]


@pytest.mark.quick("find_unused_parameters gradient_as_bucket_view")
@pytest.mark.parametrize("options", _options_of_reducers(), ids=" ".join)
def test_a_new_reducer_is_made_as_the_first_one_but_for_buckets(
    one_rank: None, options: dict[str, Any]
) -> None:
    """All that the installed torch's constructor passes on to a Reducer is compared."""
    original = torch.distributed.Reducer
    with mock.patch.object(torch.distributed, "Reducer", side_effect=original) as made:
        ddp = DistributedDataParallel(MLP(1), **options)
        _torch.replace_reducer(ddp, [[0], [1]], [1, 1])
    first, second = ([*call.args, *call.kwargs.values()] for call in made.call_args_list)
    pairs = list(zip(first, second, strict=True))
    for before, after in pairs:
        if isinstance(before, list):  # parameters, buckets, limits, which are sparse
            assert isinstance(after, list)
        else:
            assert before == after


@pytest.mark.quick("{}")
@pytest.mark.parametrize("options", [{}, STATIC], ids=str)
def test_a_change_of_reducers_runs_no_hook_and_leaves_gradients_alone(
    one_rank: None, options: dict[str, Any]
) -> None:
    """A new Reducer takes its first steps with gradients of its own."""
    ddp = DistributedDataParallel(MLP(1), **options)
    calls = []

    def note(*_arguments):  # type: ignore[no-untyped-def]  # DDP refuses annotations of others
        calls.append("hook")

    def reduce(_state, bucket):  # type: ignore[no-untyped-def]
        calls.append("comm hook")
        return default_hooks.allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, reduce)
    weight = ddp.module.layers[0].weight
    weight.register_hook(note)
    weight.register_post_accumulate_grad_hook(note)
    _torch.accumulate_node(weight).register_hook(note)  # DDP alone keeps this node alive
    train(ddp, batches(0, [(2, WIDTH)] * 3))
    gradients = [parameter.grad for parameter in ddp.parameters()]
    values = [gradient.clone() for gradient in gradients]
    calls.clear()
    _torch.replace_reducer(ddp, [[1], [0]], [1, 1], {0: 1, 1: 1})
    assert calls == []
    for parameter, gradient, value in zip(ddp.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)
    assert _torch.final_buckets(ddp) == ((1,), (0,))
    assert not _torch.will_rebuild_buckets(ddp)
    train(ddp, batches(0, [(2, WIDTH)]))
    assert sorted(calls) == ["comm hook"] * 2 + ["hook"] * 3


def test_a_setting_that_is_not_known_is_found_where_it_is_set(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting whose value the module does not show is found too."""
    ddp = DistributedDataParallel(MLP(1))
    assert _torch.find_unknown_setting(ddp) == ""
    settings = {**_torch.ddp_settings(), "option": False}
    monkeypatch.setattr(_torch.new_reducer, "ddp_settings", lambda: settings)
    assert _torch.find_unknown_setting(ddp) == "its option, which it may have been made with"
    ddp.option = False
    assert _torch.find_unknown_setting(ddp) == ""
    ddp.option = 3
    assert _torch.find_unknown_setting(ddp) == "its option=3"


def test_a_setting_that_a_reducer_was_not_told_of_is_found(one_rank: None) -> None:
    """DDP reads it off the module again for a new one."""
    ddp = DistributedDataParallel(MLP(1))
    assert _torch.find_changed_setting(ddp) == ""
    ddp.find_unused_parameters = True
    assert _torch.find_changed_setting(ddp) == "find_unused_parameters"


def test_a_backward_that_is_finalized_by_hand_still_is(one_rank: None) -> None:
    """DDP sets that property, of torch 2.15, on its Reducer."""
    ddp = DistributedDataParallel(MLP(1))
    if not hasattr(ddp, "require_manual_backward_finalization"):
        pytest.skip(f"torch {torch.__version__} has no such property")
    ddp.require_manual_backward_finalization = True
    _torch.replace_reducer(ddp, [[0], [1]], [1, 1])
    assert _torch.final_buckets(ddp) == ((0,), (1,))
    for _ in range(3):
        ddp(torch.ones(2, 64)).sum().backward()
        ddp.finalize_backward()
        with pytest.raises(RuntimeError):  # there is nothing left: backward did not do it, we did
            ddp.finalize_backward()
