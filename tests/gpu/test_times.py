"""What overlaps on the device, and what it costs: measured by the benchmarks, for the page.

On the CPU models are small, and a thread sleeps in place of the emulated network's kernels.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cost import compiling
from benchmarks.harness.cluster import Cluster
from benchmarks.harness.models import MissingPackageError, find_model
from benchmarks.harness.teams import Setting, Team, open_team
from benchmarks.harness.trace import Summary
from benchmarks.overlap.__main__ import main as measure_overlap
from tests.gpu.notes import folder_for
from tests.support.device import DEVICE

_IS_CUDA = DEVICE.type == "cuda"
MODELS = ("gpt2-small", "gpt2-medium", "bert-base", "resnet50-imagenet") if _IS_CUDA else ("tiny",)
_CAP = "default" if _IS_CUDA else "1"
_RATES, _ROUNDS = ("100gbit,400gbit", "5") if _IS_CUDA else ("2gbit", "1")
_ALL_PEERS = "eager,nosplit,intree,forward,backward,auto"
_PEERS = _ALL_PEERS if _IS_CUDA else "nosplit,backward"
_NUM_RANKS = 64  # of the emulated network
_PROFILE_GBIT = 100 if _IS_CUDA else 5


@pytest.fixture
def _packages() -> None:
    """Skip a test whose models come from packages that are not installed."""
    try:
        find_model(MODELS[0]).num_parameters()
    except MissingPackageError as error:
        pytest.skip(str(error))


@pytest.mark.nightly  # on a CPU: `make gpu` runs it whatever it is marked
@pytest.mark.usefixtures("_packages")
def test_more_runs_beside_communication_than_unsplit(
    device: str, inner_backend: str, tmp_path: Path, record_property: Any
) -> None:
    """A profile of steps shows it by the order of events, which a busy machine does not change."""
    cluster = Cluster(num_ranks=1, local_ranks=(0,))
    setting = Setting(
        inner=inner_backend,
        num_threads=None if _IS_CUDA else 1,
        folder=tmp_path,
        device=device,
        emulated_ranks=_NUM_RANKS,
    )
    cap_mb = None if _CAP == "default" else float(_CAP)
    folder = folder_for("profiles", tmp_path)
    folder.mkdir(exist_ok=True)

    def profile(peer: str, team: Team) -> Summary:
        team.wait_until_ready()
        team.ask("first_steps")
        team.ask("use_rate", _PROFILE_GBIT)
        summary: Summary = team.ask("profile", str(folder / f"{peer}.json"))
        return summary

    summaries = {}
    for peer in ("nosplit", "backward"):
        with open_team(cluster, setting, peer, MODELS[0], cap_mb, tmp_path / peer) as team:
            summaries[peer] = summary = profile(peer, team)
        assert summary.num_products, "no matrix product was recognised"
        assert summary.num_streams >= 2 or not _IS_CUDA, "kernels ran on one stream alone"
    record_property(
        "said",
        "; ".join(
            f"{peer}: {summary.num_beside} of {summary.num_products} matrix products began beside "
            f"communication, of which {summary.hidden_ms:.1f} of {summary.communication_ms:.1f} ms "
            "were hidden"
            for peer, summary in summaries.items()
        ),
    )
    assert summaries["backward"].num_beside > summaries["nosplit"].num_beside


@pytest.mark.nightly  # on a CPU, as above
@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("model", MODELS)
def test_peers_compute_the_same_losses(
    device: str, inner_backend: str, model: str, tmp_path: Path, record_property: Any
) -> None:
    """Peers take turns on one emulated network; the page shows what overlaps."""
    folder = folder_for(model, tmp_path)
    arguments = ["--device", device, "--inner", inner_backend, "--models", model, "--caps", _CAP]
    arguments += ["--emulated-ranks", str(_NUM_RANKS), "--rates", _RATES, "--peers", _PEERS]
    arguments += ["--rounds", _ROUNDS, "--output", str(folder)]
    status = measure_overlap(arguments)
    record_property("page", (folder / "overlap.md").read_text())
    assert status == 0


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("model", MODELS[:1])
def test_a_first_step_has_a_cost_with_an_empty_and_a_filled_cache(
    device: str, model: str, record_property: Any
) -> None:
    """Peers are measured beside each other, so look at CPU time; the page has the table."""
    peers = ("nosplit", "intree", "forward", "backward") if _IS_CUDA else ("nosplit", "backward")
    cap_mb = 25.0 if _CAP == "default" else float(_CAP)

    def measure(peer: str) -> dict[str, list[compiling.Cost]]:
        return compiling.cold_and_warm(model, peer, cap_mb, device)

    with ThreadPoolExecutor(len(peers)) as pool:
        costs = dict(zip(peers, pool.map(measure, peers), strict=True))
    record_property("page", "\n".join(compiling.report({model: costs})))
    for peer in peers:
        assert costs[peer].keys() == {"cold", "warm"}, peer
        for (cost,) in costs[peer].values():
            assert cost.cpu_s > 0, peer
            assert cost.wall_s > 0, peer
