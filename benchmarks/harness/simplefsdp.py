"""SimpleFSDP's replicate mode (arXiv 2411.00284): data parallel training that a compiler sees.

Parameters are DTensors, equal on all ranks. A module that uses one gets its local tensor, whose
gradient is this rank's part of a mean; so the compiled backward has an allreduce for each use.
Inductor leaves them there, or, told how fast all is, fills buckets with them and moves those; or
each layer of the model is a bucket.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from slow_link import Rate
from torch import Tensor, fx, nn
from torch.distributed.tensor import Partial, Replicate, distribute_tensor


class Replicated(nn.Module):
    """What trains a module as DDP does, whose arguments it takes and has no use for."""

    def __init__(self, module: nn.Module, **_of_ddp: object) -> None:
        super().__init__()
        self.module = module
        self._is_averaging = True
        device = next(module.parameters()).device
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        made: dict[nn.Parameter, nn.Parameter] = {}  # what two modules share stays shared
        for part in list(module.modules()):
            own = {name: value for name, value in part._parameters.items() if value is not None}
            for name, value in own.items():
                if value not in made:
                    tensor = distribute_tensor(value.detach(), mesh, [Replicate()])
                    made[value] = nn.Parameter(tensor, value.requires_grad)
                part._parameters[name] = made[value]
            if own:
                uses = {name: property(functools.partial(self._use, name)) for name in own}
                part.__class__ = type(type(part).__name__, (type(part),), uses)

    def forward(self, **batch: Tensor) -> Any:
        return self.module(**batch)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: keep gradients to this rank in this block, which Dynamo compiles anew."""
        self._is_averaging = False
        try:
            yield
        finally:
            self._is_averaging = True

    def _use(self, name: str, part: nn.Module) -> Tensor:
        gradient = Partial("avg") if self._is_averaging else Replicate()
        whole: Any = part._parameters[name]
        whole = whole.redistribute(placements=[Replicate()])  # the allreduce is in its backward
        local: Tensor = whole.to_local(grad_placements=[gradient])
        return local


def compile_scheduled(module: nn.Module, inner: str, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile as one graph; given `gbit`, the network's rate, Inductor schedules the allreduces.

    `gflops` and `gbytes` are one core's rates in a second, for which a CPU has no data sheet. They
    are given, not measured, so that all ranks schedule alike.
    """
    options = dict(options)
    if "gbit" in options:
        gflops, gbytes = options.pop("gflops", 50.0), options.pop("gbytes", 10.0)
        rates = importlib.import_module("torch.utils._runtime_estimation")
        # There two operations are one, and a kernel reaches three quarters of the data sheet.
        vars(rates)["get_device_tflops"] = lambda *_args, **_kwargs: gflops / 1e3 / 1.5
        vars(rates)["get_gpu_dram_gbps"] = lambda: gbytes
        vars(rates)["get_device_dram_gbps"] = lambda *_args, **_kwargs: gbytes  # since torch 2.15
        scheduling = {
            "enable_overlap_scheduling": True,
            "collective_bucketing": True,
            "insert_overlap_deps": True,
            # torch 2.13: some of those make a cycle (the model tiny), and its error names this.
            "overlap_scheduling_autofix_cycles": True,
            "compute_estimator": "analytical",  # the other one times kernels on a GPU
            "custom_runtime_estimation": functools.partial(_estimate_ms, options.pop("gbit")),
        }
        where = "aten_distributed_optimizations"
        options |= {f"{where}.{name}": value for name, value in scheduling.items()}
    compiled: Callable[..., Any] = torch.compile(module, backend=inner, options=options or None)
    return compiled


def compile_by_layer(module: Replicated, inner: str, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile as one graph, in which the allreduces of a layer are one, which the next one hides.

    So torchtitan trains, with the scheduler that it has Inductor run; from torch 2.15 on, which
    takes allreduces too. Each member of an outermost `ModuleList` is a layer, and what is
    registered between two lists is one bucket.

    Raises:
        ValueError: the compiler is another one than Inductor.
    """
    if inner != "inductor":
        raise ValueError(f"the compiler is {inner!r}; only 'inductor' has a scheduler to bucket by")
    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")
    bucket_by_parameter = buckets_by_layer(module.module)

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        # Gradients come out of the backward graph as their parameters go into the forward graph.
        buckets = [bucket_by_parameter[x] for x in inputs if x in bucket_by_parameter]
        patches = options | {
            "post_grad_custom_post_pass": functools.partial(_bucket_by_layer, buckets),
            # As torchtitan sets them, since the order of the graph is to be kept.
            "allow_buffer_reuse": False,
            "reorder_for_peak_memory": False,
            "reorder_for_compute_comm_overlap": False,
        }
        return compile_fx.compile_fx(gm, inputs, config_patches=patches)

    compiled: Callable[..., Any] = torch.compile(module, backend=compile_graph)
    return compiled


def buckets_by_layer(module: nn.Module) -> dict[Tensor, str]:
    """Return the name of each trained parameter's bucket, in the order of registration."""
    list_names = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    buckets: dict[Tensor, str] = {}
    num_layers_before = 0
    layer = ""
    for name, parameter in module.named_parameters():
        lists = [list_name for list_name in list_names if name.startswith(f"{list_name}.")]
        if lists:
            rest = name.removeprefix(f"{lists[0]}.")  # modules are listed from outside
            new_layer = f"{lists[0]}.{rest.partition('.')[0]}"
            num_layers_before += new_layer != layer
            layer = new_layer
        if parameter.requires_grad:
            bucket = layer if lists else f"behind {num_layers_before} layers"
            buckets[parameter] = bucket.replace(".", "_")  # a dot would be a module's in another
    return buckets


def _bucket_by_layer(buckets: Sequence[str], graph: fx.Graph) -> None:
    """Merge the allreduces of a backward graph whose gradients have the same bucket, and move them.

    `buckets` has the one of each gradient, in the order in which the graph returns them.
    """
    all_reduce = torch.ops._c10d_functional.all_reduce.default
    if not graph.find_nodes(op="call_function", target=all_reduce):
        return  # a forward graph
    (returned,) = graph.output_node().args
    # Besides gradients, it returns what it was given, and None.
    gradients = [n for n in returned if isinstance(n, fx.Node) and n.op != "placeholder"]
    assert len(gradients) == len(buckets), (len(gradients), len(buckets))
    bucket_of: dict[fx.Node, str] = {}
    for gradient, bucket in zip(gradients, buckets, strict=True):
        # A parameter that is used twice has the sum of two means.
        nodes = [gradient]
        while nodes:
            node = nodes.pop()
            if node.target is all_reduce:
                bucket_of[node] = bucket
            else:
                nodes += node.all_input_nodes

    def find_module(node: fx.Node) -> list[tuple[str, type[nn.Module]]]:
        return [(bucket_of[node], nn.Module)] if node in bucket_of else []

    scheduling = importlib.import_module("torch._inductor.fx_passes.overlap_manual_scheduling")
    scheduling.manual_overlap_bucketing(
        graph.owning_module,
        module_bucket_plans=list(dict.fromkeys(buckets)),
        insert_overlap_deps=True,
        module_stack_fn=find_module,
    )


def _estimate_ms(gbit: float, node: fx.Node, num_bytes: int | None = None) -> float:
    """Return how long a node takes; an allreduce may be asked for as if of another size."""
    inductor: Any = torch._inductor
    if node.target is not torch.ops._c10d_functional.all_reduce.default:
        ms: float = inductor.fx_passes.overlap_scheduling.estimate_roofline_runtime_ms(node)
        return ms
    if num_bytes is None:
        num_bytes = inductor.comm_analysis.estimate_fx_collective_memory_footprint(node)
    return 1e3 * Rate(gbit=gbit, num_ranks=dist.get_world_size()).cost.seconds(num_bytes)
