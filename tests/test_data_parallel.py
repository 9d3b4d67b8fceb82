"""DataParallel equals training on one device with the whole batch, with compiled replicas.

There is no accelerator here, and torch's own DataParallel refuses CPUs: the reference is the module
itself.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import math
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.parallel import DistributedDataParallel

from ddpopt import data_parallel
from ddpopt.data_parallel import DataParallel, _refuse_cuda_graphs, _signature_of, _state_of
from tests.support.logs import logged
from tests.support.models import MLP

CPUS = ["cpu", "cpu"]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # sums of chunks are rounded otherwise than sums of rows


class RecordingBackend:
    """A backend that runs graphs as they are, and records in which threads."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.threads: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            self.threads.append(threading.get_ident())
            return graph(*args)

        return run

    @property
    def num_linear(self) -> int:
        """The number of graphs that have a linear layer in them."""
        return sum("linear" in graph.print_readable(print_output=False) for graph in self.graphs)


class Calls(nn.Module):
    """A module whose forward is a function of it and its arguments; `weight` is 4 x 4."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float
    kind: str = dataclasses.field(default="batch", init=False)


class Factories(defaultdict[str, Any]):
    """A dict of a class that derives from defaultdict."""


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def _rows(count: int, width: int = 4) -> torch.Tensor:
    return torch.arange(count * width, dtype=torch.float32).reshape(count, width)


def _parallel(
    function: Callable[..., Any], devices: list[str] | None = None, **options: Any
) -> Any:
    options.setdefault("backend", "eager")
    return DataParallel(Calls(function), devices or CPUS, **options)


def _assert_equal_gradients(module: nn.Module, reference: nn.Module) -> None:
    pairs = zip(module.named_parameters(), reference.parameters(), strict=True)
    for (name, parameter), expected in pairs:
        assert (parameter.grad is None) == (expected.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, **TOLERANCE)


# ---- equal to one device ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "num_devices", "num_rows"),
    [
        ("eager", 2, 8),
        ("aot_eager", 1, 8),
        ("aot_eager", 4, 5),
        ("aot_eager", 4, 1),
        ("ddpopt with aot_eager", 2, 8),
        pytest.param("ddpopt", 2, 8, marks=pytest.mark.slow),  # with Inductor
        pytest.param("inductor", 2, 8, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_those_of_the_whole_batch(
    backend: str, num_devices: int, num_rows: int
) -> None:
    """Replicas run one by one the first time, and then at the same time."""
    module = MLP(depth=2)
    reference = copy.deepcopy(module)
    name, _, inner = backend.partition(" with ")
    options: dict[str, Any] = {"options": {"inner": inner}} if inner else {}
    parallel = DataParallel(module, ["cpu"] * num_devices, backend=name, **options)
    x = torch.randn(num_rows, 64)
    for _ in range(3):
        module.zero_grad()
        reference.zero_grad()
        output, expected = parallel(x), reference(x)
        torch.testing.assert_close(output, expected, **TOLERANCE)
        output.square().mean().backward()
        expected.square().mean().backward()
        _assert_equal_gradients(module, reference)


def test_training_equals_training_on_one_device() -> None:
    """Ten steps of Adam, with batches of several sizes, end with equal parameters."""
    module = MLP(depth=3)
    reference = copy.deepcopy(module)
    losses = []
    for trained, call in (
        (reference, reference),
        (module, DataParallel(module, ["cpu"] * 3, backend="aot_eager")),
    ):
        optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
        inputs = torch.Generator().manual_seed(7)
        for step in range(10):
            x = torch.randn(9 if step % 3 else 7, 64, generator=inputs)
            loss = (call(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[10:] == pytest.approx(losses[:10], rel=1e-5)
    for parameter, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-5)


def test_gradients_flow_to_the_arguments() -> None:
    """A row has a gradient of its own, a 0-dimensional argument the sum over replicas."""
    parallel = _parallel(lambda m, x, scale: x @ m.weight * scale, backend="aot_eager")
    x, scale = _rows(4).requires_grad_(), torch.tensor(3.0, requires_grad=True)
    parallel(x, scale).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((4, 4), 3.0))
    torch.testing.assert_close(scale.grad, x.detach().sum())


def test_unused_parameters_keep_no_gradient_and_shared_ones_have_one_sum() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
            self.again = self.first
            self.tied = nn.Linear(4, 4, bias=False)
            self.tied.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.again(self.first(x)).relu())

    module = Model()
    reference = copy.deepcopy(module)
    DataParallel(module, CPUS, backend="aot_eager")(_rows(6)).sum().backward()
    reference(_rows(6)).sum().backward()
    assert module.unused.weight.grad is None
    _assert_equal_gradients(module, reference)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(8, 4, batch_first=True),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    ],
)
def test_modules_of_torch_are_replicated(make: Callable[[], nn.Module]) -> None:
    """Some modules keep lists of their weights, or make weights from others."""
    module = make()
    reference = copy.deepcopy(module)
    parallel = DataParallel(module, CPUS, backend="aot_eager")
    x = torch.randn(4, 3, 8)
    for model in (parallel, reference):
        output = model(x)
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
    _assert_equal_gradients(module, reference)


def test_a_buffer_may_be_a_parameter() -> None:
    """A module may register one that is not trained as a buffer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("scale", nn.Parameter(torch.full((8,), 2.0), requires_grad=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.scale

    x = torch.randn(4, 8)
    assert torch.equal(DataParallel(Model(), CPUS, backend="aot_eager")(x), x * 2)


def test_a_replica_lists_its_parameters() -> None:
    """Models ask for their dtype so; in torch's DataParallel replicas have none."""

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.to(next(module.parameters()).dtype) * sum(p.sum() for p in module.parameters())

    parallel = _parallel(forward, backend="aot_eager")
    parallel(_rows(4)).sum().backward()
    torch.testing.assert_close(parallel.module.weight.grad, _rows(4).sum().expand(4, 4))


# ---- buffers and state ------------------------------------------------------------------------


def test_batch_norm_keeps_the_statistics_of_the_first_chunk() -> None:
    """A module alone that sees only that chunk has the same; in eval nothing is written."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    reference = copy.deepcopy(module)
    parallel = DataParallel(module, CPUS, backend="aot_eager")
    x = torch.randn(8, 4)
    for _ in range(3):
        parallel(x)
        reference(x[:4])
    before = copy.deepcopy(module[1].state_dict())
    for name, value in reference[1].state_dict().items():
        torch.testing.assert_close(before[name], value, **TOLERANCE)
    assert before["num_batches_tracked"] == 3
    parallel.eval()
    reference.eval()
    torch.testing.assert_close(parallel(x), reference(x), **TOLERANCE)
    for name, value in module[1].state_dict().items():
        assert torch.equal(before[name], value)


def test_attributes_that_a_replica_sets_are_lost() -> None:
    """Torch's DataParallel loses such attributes, too."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.seen = x
        return x

    parallel = _parallel(forward)
    parallel(_rows(4))
    assert not hasattr(parallel.module, "seen")


def test_state_dict_has_the_names_of_torchs_data_parallel() -> None:
    """The names are `module.` and those of the module; the state can be loaded back."""
    parallel = DataParallel(MLP(depth=1), CPUS)
    assert list(parallel.state_dict()) == ["module.layers.0.weight", "module.layers.0.bias"]
    assert list(nn.DataParallel(MLP(depth=1)).state_dict()) == list(parallel.state_dict())
    other = DataParallel(MLP(depth=1), CPUS)
    other.load_state_dict(parallel.state_dict())
    assert torch.equal(other.module.layers[0].weight, parallel.module.layers[0].weight)


def test_copies_and_files_of_a_data_parallel_module_work() -> None:
    """The compiled code stays behind."""
    parallel = DataParallel(MLP(depth=1), CPUS, backend="eager")
    x = torch.randn(4, 64)
    expected = parallel(x)
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    for other in (copy.deepcopy(parallel), torch.load(file, weights_only=False)):
        assert other.module is not parallel.module
        assert torch.equal(other(x), expected)


def test_nothing_outlives_the_model() -> None:
    """No thread of a replica is left after a forward, and the module can be freed."""
    parallel = DataParallel(MLP(depth=1), CPUS, backend="eager")
    for _ in range(3):
        parallel(torch.randn(4, 64)).sum().backward()
    assert not [t for t in threading.enumerate() if t.name.startswith("ddpopt-replica")]
    module = weakref.ref(parallel.module)
    del parallel
    gc.collect()
    assert module() is None


# ---- compiled once ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [2, 4])
def test_all_replicas_of_all_steps_share_one_graph(num_devices: int) -> None:
    """Training compiles once, `no_grad` once more, and coming back to either nothing."""
    backend = RecordingBackend()
    parallel = DataParallel(MLP(depth=2), ["cpu"] * num_devices, backend=backend)
    x = torch.randn(8, 64)
    for _ in range(5):
        parallel(x).sum().backward()
    assert len(backend.graphs) == 1
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with mode():
                parallel(x)
    assert len(backend.graphs) == 3
    parallel(x).sum().backward()
    assert len(backend.graphs) == 3


def test_models_do_not_count_against_each_others_recompile_limit() -> None:
    """Dynamo compiles a function 8 times; each model has a function of its own."""
    backend = RecordingBackend()
    for _ in range(10):
        DataParallel(MLP(depth=1), CPUS, backend=backend, fullgraph=True)(torch.randn(2, 64))
    assert len(backend.graphs) == 10


def test_the_recompile_limit_is_one_of_each_device() -> None:
    """Eight variants on two kinds of devices make 16 graphs; "meta" is a kind without numbers."""

    def forward(module: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        return getattr(torch, name)(x @ module.weight)

    backend = RecordingBackend()
    parallel = _parallel(forward, ["cpu", "meta"], output_device="meta", backend=backend)
    with torch.no_grad():
        for name in ["sin", "cos", "tan", "exp", "abs", "neg", "relu", "sqrt"] * 2:
            assert parallel(_rows(4), name).shape == (4, 4)
    assert len(backend.graphs) == 16


def test_backward_is_compiled_in_the_forward() -> None:
    """Otherwise autograd's threads, one for each GPU, would compile at the same time."""
    compiled: list[str] = []

    def compiler(kind: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
            compiled.append(kind)
            return graph

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    parallel = DataParallel(MLP(depth=1), CPUS, backend=backend)
    output = parallel(torch.randn(4, 64))
    assert compiled == ["forward", "backward"]
    output.sum().backward()
    assert compiled == ["forward", "backward"]


def _like_torchs(module: nn.Module) -> nn.Module:
    """The structure of nn.DataParallel: replicas in threads, joined with cat."""

    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs: dict[int, torch.Tensor] = {}

            def run(index: int, chunk: torch.Tensor) -> None:
                outputs[index] = self.module(chunk)

            threads = [threading.Thread(target=run, args=item) for item in enumerate(x.chunk(2))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return torch.cat([outputs[0], outputs[1]])

    return Threaded()


def test_replicas_of_torchs_data_parallel_run_eagerly_and_ours_compiled() -> None:
    """`torch.compile` around nn.DataParallel's structure finds no linear layer; around this it may.

    Nothing is compiled beside the replicas.
    """
    x = torch.randn(4, 64)
    around, inside = RecordingBackend(), RecordingBackend()
    torch.compile(_like_torchs(MLP(depth=1)), backend=around)(x)
    assert around.num_linear == 0
    compiled = torch.compile(DataParallel(MLP(depth=1), CPUS, backend=inside), backend=around)
    compiled(x)
    compiled(x)
    assert (around.num_linear, inside.num_linear, len(inside.graphs)) == (0, 1, 1)
    assert len(inside.threads) == 4


def test_the_first_call_runs_in_turn_and_others_at_the_same_time() -> None:
    """Later replicas wait at a barrier that opens when each thread has come to it."""
    barrier = threading.Barrier(3)
    submit = ThreadPoolExecutor.submit
    events: list[Any] = []  # the first number of a replica that runs, "start" of a thread's
    threads: list[int] = []
    together = False

    @torch.compiler.disable
    def meet(x: torch.Tensor) -> None:
        events.append(x[0, 0].item())
        threads.append(threading.get_ident())
        if together:
            barrier.wait(timeout=300)

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        meet(x)
        return x @ module.weight

    def start(*args: Any) -> Any:
        events.append("start")
        return submit(*args)

    parallel = _parallel(forward, ["cpu"] * 3)
    with mock.patch.object(ThreadPoolExecutor, "submit", start):
        parallel(_rows(3))
    assert events == [0, "start", 4, "start", 8]
    together = True
    threads.clear()
    parallel(_rows(3))
    assert threading.get_ident() in threads
    assert len(set(threads)) == 3


def _set_an_attribute(parallel: Any) -> None:
    parallel.module.temperature = 2.0


def _register_a_hook(parallel: Any) -> None:
    parallel.module.register_forward_hook(lambda *_: None)


def _as_it_is(argument: Any) -> Any:
    return argument


@pytest.mark.parametrize(
    ("change_module", "change_input"),
    [
        (_as_it_is, lambda x: x[:3]),
        (_as_it_is, lambda x: x.double()),
        (_as_it_is, lambda x: x.clone().requires_grad_()),
        (lambda parallel: parallel.eval(), _as_it_is),
        (lambda parallel: parallel.requires_grad_(False), _as_it_is),
        (_set_an_attribute, _as_it_is),
        (_register_a_hook, _as_it_is),
    ],
)
def test_what_may_be_compiled_anew_is_a_new_call(
    change_module: Callable[[Any], Any], change_input: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Other sizes, types, modes, plain attributes or hooks make a new call; equal ones do not."""
    parallel, x = _parallel(lambda m, x: x, ["cpu"] * 2), _rows(4)
    known = (_state_of(parallel.module), _signature_of((x, {})))
    assert (_state_of(parallel.module), _signature_of((x.clone(), {}))) == known
    change_module(parallel)
    assert (_state_of(parallel.module), _signature_of((change_input(x), {}))) != known


def test_changed_hooks_are_noticed_after_compiling() -> None:
    """Dynamo by itself does not look whether a module has got a hook."""
    parallel = DataParallel(MLP(depth=2), CPUS, backend="aot_eager")
    x = torch.randn(4, 64)
    expected = parallel(x)
    parallel(x)
    handle = parallel.module.layers[1].register_forward_hook(lambda *_: torch.ones(2, 64))
    for _ in range(3):
        assert torch.equal(parallel(x), torch.ones(4, 64))
    handle.remove()
    assert torch.equal(parallel(x), expected)


# ---- hooks ------------------------------------------------------------------------------------


def test_hooks_of_the_wrapper_see_the_whole_batch_once() -> None:
    """The hooks are forward pre-hooks, forward hooks and full backward hooks."""
    parallel = DataParallel(MLP(depth=1), CPUS, backend="aot_eager")
    seen: list[Any] = []
    parallel.register_forward_pre_hook(lambda m, args: seen.append((m, len(args[0]))))
    parallel.register_forward_hook(lambda m, args, out: seen.append((m, len(args[0]), len(out))))
    parallel.register_full_backward_hook(lambda m, _, out: seen.append((m, len(out[0]))))
    for _ in range(3):
        parallel(torch.randn(5, 64, requires_grad=True)).sum().backward()
    assert seen == [(parallel, 5), (parallel, 5, 5), (parallel, 5)] * 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("place", ["", "layers.1"])
def test_hooks_of_the_module_run_once_in_each_replica(backend: str, place: str) -> None:
    """A hook gets the replica and its rows; no call is lost, and nothing is recompiled."""
    module = MLP(depth=2)
    hooked = module.get_submodule(place)
    seen: list[tuple[str, int]] = []

    def note(kind: str, replica: nn.Module, tensor: torch.Tensor) -> None:
        assert type(replica) is type(hooked)
        assert replica is not hooked
        seen.append((kind, len(tensor)))

    hooked.register_forward_pre_hook(lambda m, args: note("pre", m, args[0]))
    hooked.register_forward_hook(
        lambda m, args, kwargs, out: note("forward", m, out), with_kwargs=True
    )
    hooked.register_full_backward_hook(lambda m, _, out: note("backward", m, out[0]))
    parallel = DataParallel(module, ["cpu"] * 3, backend=backend)
    for _ in range(12):
        del seen[:]
        parallel(torch.randn(5, 64, requires_grad=True)).sum().backward()
        assert sorted(seen) == sorted(
            (kind, rows) for kind in ("pre", "forward", "backward") for rows in (2, 2, 1)
        )


def test_hooks_of_a_parameter_see_the_sum_once() -> None:
    """The parameter is that of the module that was given, not a replica's."""
    parallel = _parallel(lambda m, x: x @ m.weight)
    seen: list[torch.Tensor] = []
    parallel.module.weight.register_hook(seen.append)
    parallel.module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    parallel(torch.ones(6, 4)).sum().backward()
    assert [tensor.unique().item() for tensor in seen] == [6.0, 6.0]


def test_hooks_change_arguments_and_outputs() -> None:
    """In replicas, hooks change them as in one module; torch's own hooks are part of the graph."""
    module = nn.utils.spectral_norm(nn.Linear(4, 4))
    module.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    reference = copy.deepcopy(module)
    parallel = DataParallel(module, CPUS, backend="aot_eager")
    for _ in range(3):
        torch.testing.assert_close(parallel(_rows(4)), reference(_rows(4)), **TOLERANCE)


def test_with_one_device_hooks_get_the_module_itself() -> None:
    """No replica is made."""
    seen = []
    parallel = _parallel(lambda m, x: x, ["cpu"])
    parallel.module.register_forward_hook(torch.compiler.disable(lambda m, *_: seen.append(m)))
    parallel(_rows(2))
    assert seen == [parallel.module]


# ---- arguments and outputs --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "num_devices", "expected"),
    [(8, 2, [4, 4]), (5, 4, [2, 2, 1]), (7, 3, [3, 3, 1]), (1, 4, [1]), (3, 4, [1, 1, 1])],
)
def test_rows_are_divided_as_chunk_divides(
    num_rows: int, num_devices: int, expected: list[int]
) -> None:
    """Fewer replicas than devices may run; a loss is a vector with a number for each."""
    parallel = _parallel(lambda m, x: torch.tensor(len(x)), ["cpu"] * num_devices)
    assert parallel(_rows(num_rows)).tolist() == expected
    assert expected == [len(chunk) for chunk in _rows(num_rows).chunk(num_devices)]


def test_a_loss_inside_the_module_is_weighted_by_the_user() -> None:
    """Of chunks of 2, 2 and 1 the mean of means is biased; sums over the number of rows are not."""
    parallel = _parallel(lambda m, x: (x @ m.weight).sum(), ["cpu"] * 4, backend="aot_eager")
    losses = parallel(_rows(5))
    assert losses.shape == (3,)
    assert losses.sum() / 5 == _rows(5).sum() / 5
    losses.sum().backward()
    torch.testing.assert_close(parallel.module.weight.grad, _rows(5).sum(0)[:, None].expand(4, 4))


def test_with_one_device_outputs_are_those_of_the_module() -> None:
    """A loss has no dimension, and objects of any class may be returned."""
    result = object()
    loss, same = _parallel(lambda m, x: (x.sum(), result), ["cpu"])(_rows(2))
    assert (loss.dim(), same) == (0, result)


def test_containers_are_divided_and_joined() -> None:
    """Containers are tuples, lists, dicts, named tuples and dataclasses, and keyword arguments."""

    def forward(module: Any, pair: Pair, batches: list[Any], *, extra: dict[str, Any]) -> Any:
        assert len(pair.first) == len(batches[0].x) == len(extra["y"]) == 2
        assert (batches[1], extra["flag"], extra["none"]) == ("text", True, None)
        return {
            "pair": Pair(pair.second, pair.first),
            "list": [batches[0].x * batches[0].scale, None],
            "batch": Batch(extra["y"], 0.5),
            "tuple": (),
            "same": 3,
        }

    x = _rows(4)
    output = _parallel(forward)(
        Pair(x, x + 1), [Batch(x + 2, 2.0), "text"], extra={"y": x + 3, "flag": True, "none": None}
    )
    assert isinstance(output["pair"], Pair)
    assert torch.equal(output["pair"].first, x + 1)
    assert torch.equal(output["pair"].second, x)
    assert torch.equal(output["list"][0], (x + 2) * 2)
    assert output["list"][1] is None
    assert torch.equal(output["batch"].x, x + 3)
    assert (output["batch"].scale, output["batch"].kind) == (0.5, "batch")
    assert (output["tuple"], output["same"]) == ((), 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: defaultdict(list, x=x),
        lambda x: OrderedDict(x=x),
        lambda x: Counter(x=x),
        lambda x: Factories(int, x=x),
    ],
    ids=["defaultdict", "OrderedDict", "Counter", "derived"],
)
def test_dicts_of_other_kinds_stay_what_they_are(make: Callable[..., Any]) -> None:
    """A dict keeps its class and default factory as an argument and as an output."""

    def forward(module: Any, chunk: Any) -> Any:
        assert len(chunk["x"]) == 2
        note(chunk)
        return make(chunk["x"] @ module.weight)

    chunks: list[Any] = []
    # Not compiled: two threads would each write a longer list in place of the one that they saw.
    note = torch.compiler.disable(chunks.append)
    batch = make(_rows(4))
    parallel = _parallel(forward)
    with mock.patch.object(data_parallel, "_run_all", wraps=data_parallel._run_all) as run_all:
        for _ in range(2):
            output = parallel(batch)
            assert torch.equal(output["x"], _rows(4))
            for made in (output, *chunks):
                assert type(made) is type(batch)
                factory = getattr(batch, "default_factory", None)
                assert getattr(made, "default_factory", None) is factory
    # Replicas run one after another, and then at the same time.
    assert [call.kwargs["one_by_one"] for call in run_all.call_args_list] == [True, False]
    assert len(chunks) == 4
    assert list(batch) == ["x"]


@pytest.mark.parametrize("nan", [math.nan, complex(0, math.nan)], ids=["float", "complex"])
def test_replicas_that_all_return_nan_do_not_differ(nan: Any) -> None:
    """Each replica makes a NaN, as a division does; a NaN beside a number still differs."""
    output = _parallel(lambda m, x: (x, [nan * 1.0]))(_rows(4))[1][0]
    assert output != output  # noqa: PLR0124  # so it is NaN
    with pytest.raises(ValueError, match=r"output\[1\] differs between replicas \(.*nan"):
        _parallel(lambda m, x: (x, nan if float(x[0, 0]) else 1.0))(_rows(4))


def test_nan_in_an_argument_makes_no_call_new() -> None:
    """Equal calls run at the same time, whatever NaN they are given."""
    assert _signature_of([float("nan")]) == _signature_of([float("nan")])
    assert _signature_of([float("nan")]) != _signature_of([1.0])
    model = Calls(lambda m, x: x)
    model.scale = float("nan")
    other = _state_of(model)
    model.scale = float("nan")
    assert _state_of(model) == other


def test_the_batch_may_be_in_keyword_arguments_alone() -> None:
    assert torch.equal(_parallel(lambda m, *, x: x @ m.weight)(x=_rows(4)), _rows(4))


def test_batches_are_divided_and_joined_along_dim() -> None:
    """The dimension may be counted from the end."""
    for dim in (1, -1):
        parallel = _parallel(lambda m, x: x + len(x[0]), dim=dim)
        assert torch.equal(parallel(_rows(2, 6)), _rows(2, 6) + 3)


def test_without_a_tensor_one_replica_runs() -> None:
    """Without a tensor nothing can be divided."""
    calls = []
    note = torch.compiler.disable(calls.append)

    def forward(module: Any, number: int = 0) -> torch.Tensor:
        note(number)
        return module.weight.sum()

    parallel = _parallel(forward)
    parallel(7)
    parallel()
    assert calls == [7, 0]


# ---- modes ------------------------------------------------------------------------------------


def test_modes_are_carried_into_the_threads() -> None:
    """The modes are no_grad, inference mode and autocast, in first and in later calls."""

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ module.weight

    parallel = _parallel(forward, backend="aot_eager")
    for _ in range(3):
        with torch.no_grad():
            assert not parallel(_rows(4)).requires_grad
        with torch.inference_mode():
            assert parallel(_rows(4)).is_inference()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert parallel(_rows(4)).dtype is torch.bfloat16
        output = parallel(_rows(4))
        assert output.requires_grad
        assert output.dtype is torch.float32


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("call", ["first", "later"])
def test_an_exception_names_replica_and_device(failing: int, call: str) -> None:
    """The exception is the same object; after it the model works again."""
    error = KeyError("no such row")
    fails = call == "first"

    @torch.compiler.disable
    def maybe_fail(x: torch.Tensor) -> None:
        if fails and x[0, 0] == 8 * failing:
            raise error

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        maybe_fail(x)
        return x @ module.weight

    parallel = _parallel(forward)
    if call == "later":
        parallel(_rows(4))
        fails = True
    with logged("warning") as warnings, pytest.raises(KeyError) as caught:
        parallel(_rows(4))
    assert caught.value is error
    assert getattr(error, "__notes__", warnings)[-1].endswith(f"in replica {failing} on cpu")
    fails = False
    assert torch.equal(parallel(_rows(4)), _rows(4))


# ---- what is refused --------------------------------------------------------------------------


def _compiled_inside() -> nn.Module:
    module = MLP(depth=2)
    module.layers[1].compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DataParallel(MLP(), []), ValueError, "devices is empty"),
        (lambda: DataParallel(MLP(), "cpu"), TypeError, "devices is 'cpu'"),
        (lambda: DataParallel(MLP(), ["gpu"]), ValueError, "device 'gpu'"),
        (lambda: DataParallel(MLP(), ["cpu", None]), ValueError, "device None"),
        (lambda: DataParallel(MLP(), [10**30]), ValueError, "device 1000"),
        (lambda: DataParallel(MLP(), CPUS, dim="0"), TypeError, "dim is '0'"),
        (lambda: DataParallel(print, CPUS), TypeError, "nn.Module"),
        (lambda: DataParallel(MLP(), ["cpu"], "meta"), ValueError, "output_device"),
        (lambda: DataParallel(MLP(), CPUS, nonsense=1), TypeError, "nonsense"),
        (
            lambda: DataParallel(torch.compile(MLP(), backend="eager"), CPUS),
            ValueError,
            "OptimizedModule.* is compiled already",
        ),
        (
            lambda: DataParallel(_compiled_inside(), CPUS),
            ValueError,
            "module 'layers.1' .Linear. is compiled already",
        ),
        (
            lambda: DataParallel(DataParallel(MLP(), CPUS), CPUS),
            ValueError,
            "the module .DataParallel. is parallel already",
        ),
        (
            lambda: DataParallel(torch.jit.trace(MLP(depth=1), torch.ones(1, 64)), CPUS),
            ValueError,
            "ScriptModule",
        ),
        (
            lambda: DataParallel(nn.Sequential(nn.DataParallel(MLP())), CPUS),
            ValueError,
            "module '0' .DataParallel. is parallel already",
        ),
    ],
)
def test_bad_arguments_of_data_parallel_are_refused_with_their_value(
    make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    """The error comes before anything is run, with the value and a remedy."""
    with pytest.raises(error, match=text):
        make()


def test_a_ddp_module_is_refused(one_rank: None) -> None:
    """DDP reduces gradients by itself."""
    with pytest.raises(ValueError, match=r"DistributedDataParallel. is parallel already"):
        DataParallel(DistributedDataParallel(MLP(depth=1)), CPUS)


@pytest.mark.parametrize(
    ("args", "dim", "text"),
    [
        ((_rows(8), _rows(2)), 0, r"along dim 0 args\[0\] has 8 rows and args\[1\] has 2"),
        ((_rows(4), {"mask": [_rows(3)]}), 0, r"args\[0\] has 4 .* args\[1\]\['mask'\]\[0\] has 3"),
        ((_rows(0),), 0, r"args\[0\] has no rows along dim 0"),
        ((_rows(4),), 2, r"args\[0\] has shape \[4, 4\].*cannot be divided along dim 2"),
        ((_rows(4),), -3, "cannot be divided along dim -3"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(
    args: tuple[Any, ...], dim: int, text: str
) -> None:
    """Torch's DataParallel leaves rows out silently."""
    with pytest.raises(ValueError, match=text):
        _parallel(lambda m, *args: args[0], dim=dim)(*args)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda m, x: object(), TypeError, "output of the module is a object, which cannot be"),
        (lambda m, x: [x, x.sum() > 20, x[0]][int(x[0, 0]) // 8 :], ValueError, "output differs"),
        (lambda m, x: (x, None if x[0, 0] else x), ValueError, r"output\[1\] differs"),
        (lambda m, x: {"a": int(x[0, 0])}, ValueError, r"output\['a'\] differs .*0; 8"),
        (lambda m, x: x[:, : 1 + int(x[0, 0])], ValueError, r"shapes \[2, 1\], \[2, 4\] in the"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(
    function: Callable[..., Any], error: type[Exception], text: str
) -> None:
    """The error has the place in the output."""
    with pytest.raises(error, match=text):
        _parallel(torch.compiler.disable(function))(_rows(4))


def test_a_module_that_is_not_on_the_first_device_is_refused_when_called() -> None:
    """The module may be moved until then."""
    parallel = DataParallel(nn.BatchNorm1d(4), CPUS, backend="eager")
    parallel.module.weight = nn.Parameter(torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match=r"parameter 'weight' is on meta.*call .to\('cpu'\) first"):
        parallel(_rows(4))
    parallel.module.weight = nn.Parameter(torch.ones(4))
    parallel.module.running_mean = torch.ones(4, device="meta")
    with pytest.raises(ValueError, match="buffer 'running_mean' is on meta"):
        parallel(_rows(4))


def test_a_module_that_is_compiled_later_is_refused() -> None:
    """Replicas of compiled code would run the original's parameters."""
    parallel = _parallel(lambda m, x: x)
    parallel.module.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled already"):
        parallel(_rows(4))


@pytest.mark.parametrize(
    ("devices", "options", "is_refused"),
    [
        (("cuda:0", "cuda:1"), {"mode": "reduce-overhead"}, True),
        (("cuda:0", "cuda:1"), {"mode": "max-autotune-no-cudagraphs"}, False),
        (("cuda:0", "cuda:1"), {"mode": "reduce-overhead", "backend": "aot_eager"}, False),
        (("cuda:0",), {"mode": "reduce-overhead"}, False),
    ],
)
def test_cuda_graphs_are_refused_for_several_gpus(
    devices: tuple[str, ...], options: dict[str, str], is_refused: bool
) -> None:
    refused = pytest.raises(ValueError, match="max-autotune-no-cudagraphs")
    with refused if is_refused else contextlib.nullcontext():
        _refuse_cuda_graphs([torch.device(name) for name in devices], options)
