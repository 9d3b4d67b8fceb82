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
from unittest import mock

import pytest
import torch
from torch import nn
from torch.profiler import profile

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.harness import cluster, simplefsdp  # noqa: E402
from benchmarks.harness.models import Chain, Model  # noqa: E402
from benchmarks.harness.peers import find_peer  # noqa: E402
from benchmarks.harness.teams import Setting, Task  # noqa: E402
from benchmarks.harness.worker import Worker  # noqa: E402
from ddpopt._torch.names import installed_release  # noqa: E402
from tests.support.ranks import Ranks  # noqa: E402

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


def _namespaces(pid: int) -> list[str]:
    return [name for name in cluster.own_namespaces() if name.startswith(f"ddpopt-{pid}-")]


def test_the_table_of_models_needs_no_further_package() -> None:
    """Models of a package that is not there are listed with what to install."""
    run = _start("-m", "benchmarks.harness.models")
    text, _ = run.communicate()
    assert run.returncode == 0, text
    names = ("gpt", "convnet", "fused", "bert", "gpt2", "t5", "resnet50", "vit")
    assert all(f"\n| {name} |" in text for name in names)


@pytest.mark.nightly
def test_what_cutting_costs_is_measured() -> None:
    """Of both splits beside the unsplit compile."""
    sizes = ("--inner", "aot_eager", "--parameters", "12", "--sections", "3", "--rounds", "2")
    run = _start("-m", "benchmarks.cost.overhead", *sizes)
    text, _ = run.communicate()
    assert run.returncode == 0, text
    assert all(f"| {arm}" in text for arm in ("backward", "forward", "unsplit again")), text


@pytest.mark.nightly
def test_tuning_measures_every_choice_of_buckets(tmp_path: Path) -> None:
    """The plan beside DDP's default and all caps, each with a prediction, at each rate anew."""
    options = ("--models", "tiny", "--rates", "1gbit,2gbit", "--rounds", "1")
    options = (*options, "--inner", "aot_eager")
    run = _start("-m", "benchmarks.overlap.tuning", *options, "--output", str(tmp_path))
    text, _ = run.communicate()
    assert run.returncode == 0, text
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
    run = _start("-m", "benchmarks.overlap", "--quick", "--output", str(tmp_path))
    text, _ = run.communicate()
    assert run.returncode == 0, text
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
    assert _namespaces(run.pid) == []


def _layers() -> Chain:
    return Chain(*(nn.Linear(64, 64) for _ in range(4)))


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(16, 64), "targets": torch.randint(64, (16,))}


LAYERS = Model("layers", "four layers of 64 x 64", _layers, _batch)
NUM_PARAMETERS = 8


def _train_as(rank: int, peer: str, inner: str) -> tuple[tuple[float, float], int]:
    """Return the losses of the first and the fourth step, and the allreduces in a later graph."""
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
def test_peers_without_ddp_compute_what_ddp_does(ranks: Ranks) -> None:
    """Also after updates; the allreduces of one are in its compiled backward."""
    alike = ("replicate", "simplefsdp")
    (base, _), (other, _) = ranks.run(_train_as, "eager", "aot_eager")
    assert base != other  # each has a batch of its own
    for peer, num_in_graph in zip(alike, (0, NUM_PARAMETERS), strict=True):
        found = ranks.run(_train_as, peer, "aot_eager")
        assert [counted for _, counted in found] == [num_in_graph] * 2
        for (losses, _), expected in zip(found, (base, other), strict=True):
            assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.nightly
def test_inductor_schedules_allreduces_for_the_rate_that_it_is_told(ranks: Ranks) -> None:
    """On a CPU, whose rates have to be told as well: fewer allreduces, and the same losses."""
    plain = ranks.run(_train_as, "simplefsdp", "aot_eager")
    trained = ranks.run(_train_as, "simplefsdp:gbit=1", "inductor")
    for (losses, counted), (expected, _) in zip(trained, plain, strict=True):
        assert 1 <= counted < NUM_PARAMETERS
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(
    installed_release() < (2, 15), reason="Inductor merges allreduces by layer since torch 2.15"
)
@pytest.mark.nightly
def test_inductor_makes_one_allreduce_a_layer(ranks: Ranks) -> None:
    """And losses are those of one for each parameter."""
    plain = ranks.run(_train_as, "simplefsdp", "aot_eager")
    trained = ranks.run(_train_as, "bylayer", "inductor")
    for (losses, counted), (expected, _) in zip(trained, plain, strict=True):
        assert counted == len(_layers().layers)
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.quick
def test_a_layer_is_a_member_of_an_outermost_list_of_modules() -> None:
    """What is registered before, between and behind layers is in buckets of its own."""
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
    """Not even one that cannot be handled."""
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
    sizes = ("--calls", "1000,2000", "--sections", "5,10", "--at-calls", "1000")
    run = _start("-m", "benchmarks.cost.scale", *sizes)
    text, _ = run.communicate()
    assert run.returncode == 0, text
    assert "\nforward: calls to the power of" in text
    assert "\nbackward: calls to the power of" in text


@pytest.mark.quick
def test_a_peer_is_named_with_its_options() -> None:
    """Values are JSON, or else text."""
    peer, options = find_peer("backward:number=1:name=text")
    assert (peer.name, options) == ("backward", {"number": 1, "name": "text"})
    with pytest.raises(ValueError, match="there are eager"):
        find_peer("nobody")
