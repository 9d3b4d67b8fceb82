"""The benchmarks run and write their tables, and leave no network behind. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import profile

from benchmarks.algorithms import peers as algorithms
from benchmarks.algorithms.report import Turn, straggler
from benchmarks.harness import cluster, simplefsdp
from benchmarks.harness.models import Chain, Model
from benchmarks.harness.peers import PEERS, find_peer
from benchmarks.harness.teams import Setting, Task
from benchmarks.harness.worker import Worker
from ddpopt._torch.names import installed_release
from tests.support.documents import ROOT, run_command
from tests.support.on_ranks import gather, on_ranks

NOT_EMULATED = cluster.why_not_emulated()
needs_network = pytest.mark.skipif(bool(NOT_EMULATED), reason=NOT_EMULATED)


def _start(*command: str, folder: Path | None = None) -> subprocess.Popen[str]:
    """Start Python; `folder` is where it puts temporary files."""
    environment = {**os.environ, **({} if folder is None else {"TMPDIR": str(folder)})}
    # As at a terminal: what runs in the background may ignore SIGINT, and its children with it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def _run(module: str, options: str = "", folder: Path | None = None) -> tuple[int, str]:
    """Run a benchmark to its good end, with its output in a folder; return its id and text."""
    to_folder = [] if folder is None else ["--output", str(folder)]
    run = _start("-m", f"benchmarks.{module}", *options.split(), *to_folder)
    text, _ = run.communicate()
    assert run.returncode == 0, text
    return run.pid, text


def _namespaces(pid: int) -> list[str]:
    return [name for name in cluster.own_namespaces() if name.startswith(f"ddpopt-{pid}-")]


def test_the_table_of_models_needs_no_further_package() -> None:
    """Models of a package that is not there are listed with what to install."""
    _, text = _run("harness.models")
    names = ("gpt", "convnet", "fused", "bert", "gpt2", "t5", "resnet50", "vit")
    assert all(f"\n| {name} |" in text for name in names)


@pytest.mark.nightly
def test_what_cutting_costs_is_measured() -> None:
    """Of both splits beside the unsplit compile."""
    sizes = "--inner aot_eager --parameters 12 --sections 3 --rounds 2"
    _, text = _run("cost.overhead", sizes)
    assert all(f"| {arm}" in text for arm in ("backward", "forward", "unsplit again")), text


@pytest.mark.nightly
def test_tuning_measures_every_choice_of_buckets(tmp_path: Path) -> None:
    """The plan beside DDP's default and all caps, each with a prediction, at each rate anew."""
    options = "--models tiny --rates 1gbit,2gbit --rounds 1 --inner aot_eager"
    _run("overlap.tuning", options, tmp_path)
    cells = json.loads((tmp_path / "overlap.tuning.json").read_text())["cells"]
    assert [cell["rate"] for cell in cells] == ["1gbit", "2gbit"]
    for cell in cells:
        rows = cell["rows"]
        assert {"auto", "default", "1000 MiB"} < rows.keys()
        assert rows["1000 MiB"]["num_buckets"] == 1 < rows["0.5 MiB"]["num_buckets"]
        measured = [(*row["backwards_s"], row["predicted_backward_s"]) for row in rows.values()]
        assert all(min(times_s) > 0 for times_s in measured)
        assert f"| tiny | 2 | {cell['rate']} |" in (tmp_path / "overlap.tuning.md").read_text()


@pytest.mark.nightly
def test_quick_measures_every_peer_and_writes_what_it_measured(tmp_path: Path) -> None:
    """A table with a row a peer, the same as JSON, a timeline; then the network is gone."""
    pid, _ = _run("overlap", "--quick", tmp_path)
    found = json.loads((tmp_path / "overlap.json").read_text())
    (cell,) = found["cells"]
    peers = ["eager", "intree", "backward"]
    assert list(cell["peers"]) == peers
    assert [compilation["peer"] for compilation in found["compilations"]] == peers
    assert all(c["facts"]["num_sections"] for c in found["compilations"] if c["peer"] != "eager")
    for peer in cell["peers"].values():
        assert len(peer["timeline"]["buckets"]) == cell["bounds"]["num_buckets"] > 1
    table = (tmp_path / "overlap.md").read_text()
    assert all(f"\n| {peer} |" in table for peer in peers)
    assert ("UNSHAPED" in table) == bool(NOT_EMULATED)
    is_drawn = importlib.util.find_spec("matplotlib") is not None
    assert bool(list(tmp_path.glob("timeline-*.png"))) == is_drawn
    assert _namespaces(pid) == []


def _layers() -> Chain:
    return Chain(*(nn.Linear(64, 64) for _ in range(4)))


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(16, 64), "targets": torch.randint(64, (16,))}


LAYERS = Model("layers", "four layers of 64 x 64", _layers, _batch)
NUM_PARAMETERS = 8


def _train_as(rank: int, peer: str, inner: str = "aot_eager") -> tuple[Any, int]:
    """Return the losses of the first and the fourth step, and the allreduces in a later graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    setting = Setting(inner=inner, num_threads=None, folder=Path())
    task = Task(
        setting=setting, peer=peer, model=f"{__name__}:LAYERS", cap_mb=None,
        rank=rank, num_ranks=2, store="", meeting="",
    )  # fmt: skip
    with mock.patch("benchmarks.harness.worker.join"):  # these ranks have a process group
        worker = Worker(task)
    first = worker.first_steps()
    worker.lone_steps(0, 2)
    with profile() as profiler:
        worker.steps(0, 1)
    names = [event.name for event in profiler.events()]
    counted = sum(name.startswith("_c10d_functional::all_reduce") for name in names)
    return (first.loss, first.later_loss), counted


@pytest.mark.nightly
@on_ranks(2)
def test_peers_without_ddp_compute_what_ddp_does(rank: int) -> None:
    """Losses equal after updates too; one peer has its allreduces in its compiled backward.

    Inductor schedules them for the rate that it is told, on a CPU too, whose rates have to be told
    as well: there are fewer then. Since torch 2.15 it makes one of each layer's.
    """
    losses, _ = _train_as(rank, "eager")
    assert len(set(gather(losses))) == 2  # each rank has a batch of its own
    losses = pytest.approx(losses, rel=1e-4)
    assert _train_as(rank, "replicate") == (losses, 0)
    assert _train_as(rank, "simplefsdp") == (losses, NUM_PARAMETERS)
    scheduled, counted = _train_as(rank, "simplefsdp:gbit=1", "inductor")
    assert scheduled == losses
    assert 1 <= counted < NUM_PARAMETERS
    if installed_release() >= (2, 15):
        assert _train_as(rank, "bylayer", "inductor") == (losses, len(_layers().layers))


@pytest.mark.quick
def test_a_layer_is_a_member_of_an_outermost_list_of_modules() -> None:
    """Parameters before, between and behind layers are in buckets of their own."""
    inner = Chain(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    body = Chain(inner, nn.Linear(1, 1))
    model = nn.ModuleDict({"first": nn.Embedding(1, 1), "body": body, "last": nn.Linear(1, 1)})
    model["last"].bias.requires_grad_(False)
    buckets = simplefsdp.buckets_by_layer(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[parameter]: bucket for parameter, bucket in buckets.items()} == {
        "first.weight": "behind 0 layers",
        "body.layers.0.layers.0.weight": "body_layers_0",
        "body.layers.0.layers.1.weight": "body_layers_0",
        "body.layers.1.weight": "body_layers_1",
        "body.layers.1.bias": "body_layers_1",
        "last.weight": "behind 2 layers",
    }


CONNECTED = """
import sys, time
from benchmarks.harness.cluster import open_cluster
with open_cluster(2) as cluster:
    cluster.set_rate("1gbit")
    print("connected", flush=True)
    time.sleep(600)
"""


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_signal_leaves_the_network_behind(number: signal.Signals) -> None:
    """Even a signal that cannot be handled takes the network down."""
    run = _start("-c", CONNECTED)
    assert run.stdout is not None
    assert run.stdout.readline() == "connected\n"
    assert len(_namespaces(run.pid)) == 3
    os.kill(run.pid, number)
    assert run.wait() != 0
    deadline = time.monotonic() + 300
    while _namespaces(run.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _namespaces(run.pid) == []


@needs_network
def test_an_interrupted_run_ends_its_processes_and_its_network(tmp_path: Path) -> None:
    """Ctrl-C while ranks are training."""
    run = _start("-m", "benchmarks.overlap", "--quick", folder=tmp_path)
    assert run.stdout is not None
    assert run.stdout.readline()  # of the network
    assert run.stdout.readline()  # of the first peer that was compiled
    os.kill(run.pid, signal.SIGINT)
    run.communicate()
    assert run.returncode != 0
    assert _namespaces(run.pid) == []
    assert not any(str(tmp_path) in command for command in _commands())
    assert list(tmp_path.iterdir()) == []


def _commands() -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=False)
    return listed.stdout.splitlines()


@pytest.mark.nightly
def test_scale_prints_its_exponents() -> None:
    """Of both splits."""
    _, text = _run("cost.scale", "--calls 1000,2000 --sections 5,10 --at-calls 1000")
    assert "\nforward: calls to the power of" in text
    assert "\nbackward: calls to the power of" in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("peers", "text", "options"),
    [
        (PEERS, "backward:number=1:name=text", {"number": 1, "name": "text"}),
        (algorithms.PEERS, "async:sync_interval_ms=20", {"sync_interval_ms": 20}),
    ],
)
def test_a_peer_is_named_with_its_options(peers: Any, text: str, options: Any) -> None:
    """Values are JSON, or else text."""
    name = text.partition(":")[0]
    assert find_peer(text, peers) == (peers[name], options)
    with pytest.raises(ValueError, match="there are eager"):
        find_peer("nobody", peers)


# ---- communication algorithms -----------------------------------------------------------------

# One of each kind; convergence has the others.
ALGORITHMS, STRAGGLING = ("eager", "ddpopt", "async"), ("eager", "async")
CONVERGING = (
    "ddpopt", "decentralized", "shift_one", "low_precision", "async", "bytegrad", "qadam",
    "fp16", "powersgd", "post_local_sgd",
)  # fmt: skip


def _measure(folder: Path, options: str) -> tuple[dict[str, Any], str]:
    """Return what the benchmark writes, as data and as text."""
    _run("algorithms", f"--quick {options}", folder)
    text = (folder / "algorithms.md").read_text()
    return json.loads((folder / "algorithms.json").read_text()), text


@pytest.mark.nightly
def test_quick_measures_algorithms_and_what_a_straggler_costs(tmp_path: Path) -> None:
    """A row each; on loopback bytes are not counted, and the table says so."""
    options = f"--algorithms {','.join(ALGORITHMS)} --straggling {','.join(STRAGGLING)} --loopback"
    found, text = _measure(tmp_path, options)
    (cell,) = found["cells"]
    assert tuple(cell["peers"]) == ALGORITHMS
    assert not found["failures"]
    assert all(peer["samples_per_s"]["low"] > 0 for peer in cell["peers"].values())
    assert all(peer["sent_bytes"] is None for peer in cell["peers"].values())
    assert "bytes were not counted" in text.lower()
    assert "UNSHAPED" in text
    rates, stragglers = text.split("## With a straggler")
    assert all(f"\n| {name} |" in rates for name in ALGORITHMS)
    assert all(f"\n| {name} | 1gbit (not applied) |" in stragglers for name in STRAGGLING)


@needs_network
def test_bytes_are_counted_at_the_interface_of_each_rank(tmp_path: Path) -> None:
    """Two ranks send a model's size in allreduce, and a quarter of it in codes of one byte."""
    found, text = _measure(tmp_path, "--algorithms eager,bytegrad --straggling=")
    (cell,) = found["cells"]
    gradient_bytes = 4 * 470_784  # of the model `small`
    sent = {name: peer["sent_bytes"] / gradient_bytes for name, peer in cell["peers"].items()}
    assert 1 < sent["eager"] < 1.1
    assert 0.25 < sent["bytegrad"] < 0.35
    assert "UNSHAPED" not in text
    assert "With a straggler" not in text


def test_a_straggler_is_compared_with_turns_before_it() -> None:
    """Fast ranks by what each did in its own time; the last rank is the slow one."""
    without = Turn(num_steps=10, times_s=(1.0, 1.0, 1.0), sent_bytes=(), num_exchanges=0)
    with_one = Turn(num_steps=10, times_s=(1.0, 1.25, 2.0), sent_bytes=(), num_exchanges=0)
    found = straggler("async", "1gbit", [(without, with_one)], num_samples=4)
    assert found.undisturbed_per_s == pytest.approx(120)
    assert found.fast.median == pytest.approx(0.9)
    assert found.slow.median == pytest.approx(0.5)


@pytest.mark.nightly
def test_convergence_compares_algorithms_on_the_same_samples(tmp_path: Path) -> None:
    """All begin with the same loss, torch's hooks too, and there is a row each."""
    torchrun = "torchrun --standalone --nproc-per-node 2 -m benchmarks.algorithms.convergence"
    options = f"--steps 8 --seeds 1 --algorithms {','.join(CONVERGING)} --output {tmp_path}"
    run_command(f"{torchrun} {options}")
    found = json.loads((tmp_path / "convergence.json").read_text())
    results = {result["peer"]: result for result in found["results"]}
    assert tuple(results) == CONVERGING
    assert len({round(result["losses"][0], 4) for result in results.values()}) == 1
    table = (tmp_path / "convergence.md").read_text()
    assert all(f"\n| {name} |" in table for name in CONVERGING)
