"""The sweep and its units, both of `simulation`; below them, the command line, of `cli`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.cli import main
from ddpopt.planning.costs import AllreduceCost, Gradient, Network, Profile
from ddpopt.planning.plan import BucketPlan, plan_buckets
from ddpopt.planning.simulation import (
    Cell,
    Stragglers,
    render,
    simulate,
    sweep,
)

MIB = 1024 * 1024
NETWORK = Network(latency_s=50e-6, bytes_per_s=1.0)


@pytest.fixture(scope="module")
def plan() -> BucketPlan:
    """100 gradients of 4 MiB, one each 2 ms, planned for 2 ranks and 1 Gbit/s."""
    gradients = tuple(
        Gradient(name=f"p{i}", num_bytes=4 * MIB, ready_s=0.002 * (i + 1)) for i in range(100)
    )
    profile = Profile(gradients=gradients, backward_s=0.2, forward_s=0.1, between_s=0.01)
    return plan_buckets(profile, AllreduceCost(startup_s=1e-4, s_per_byte=8e-9), 2)


@pytest.fixture
def plan_path(plan: BucketPlan, tmp_path: Path) -> str:
    """The path of that plan."""
    path = tmp_path / "plan.json"
    plan.save(path)
    return str(path)


def test_there_is_a_cell_for_each_world_size_and_bandwidth(plan: BucketPlan) -> None:
    """Cells come in the order of the arguments."""
    cells = sweep(plan, (64, 2), (125e6, 12.5e9), NETWORK)
    assert [(cell.world_size, cell.bytes_per_s) for cell in cells] == [
        (64, 125e6), (64, 12.5e9), (2, 125e6), (2, 12.5e9),
    ]  # fmt: skip


def test_a_cell_holds_the_simulators_efficiencies(plan: BucketPlan) -> None:
    """One is of the saved plan, one of the plan made for that cluster; both with stragglers."""
    slow = Stragglers(mean_delay=0.1, seed=5)
    links = Network(latency_s=50e-6, bytes_per_s=125e6)
    (cell,) = sweep(plan, (64,), (125e6,), NETWORK, slow)
    there = plan_buckets(plan.profile, links.allreduce(64), 64)
    saved, replanned = (
        simulate(made, world_size=64, network=links, stragglers=slow) for made in (plan, there)
    )
    assert cell.saved == saved.efficiency
    assert cell.replanned == replanned.efficiency
    assert cell.num_buckets == len(there.buckets) != len(plan.buckets)


def test_default_buckets_are_ddps(plan: BucketPlan) -> None:
    """1 MiB takes one gradient, 25 MiB seven, so there are 16 buckets."""
    (cell,) = sweep(plan, (2,), (1.25e9,), NETWORK)
    sizes = (1, *(7,) * 14, 1)
    default = BucketPlan(profile=plan.profile, cost=plan.cost, world_size=2, sizes=sizes)
    links = Network(latency_s=50e-6, bytes_per_s=1.25e9)
    assert cell.default == simulate(default, world_size=2, network=links).efficiency


@given(ranks=st.integers(2, 5000), gbit=st.floats(0.1, 1000))
def test_nothing_beats_the_plan_made_for_a_cluster(
    plan: BucketPlan, ranks: int, gbit: float
) -> None:
    """Here allreduces do not slow computation down, and cuts are free."""
    (cell,) = sweep(plan, (ranks,), (gbit * 125e6,), NETWORK)
    assert cell.replanned >= max(cell.saved, cell.default) - 1e-9


def _cell(saved: float, default: float, replanned: float) -> Cell:
    return Cell(
        world_size=8,
        bytes_per_s=1.25e9,
        saved=saved,
        default=default,
        replanned=replanned,
        num_buckets=3,
    )


def test_the_best_is_the_simplest_of_equally_good_ones() -> None:
    """A difference that nobody can measure needs no new plan."""
    assert _cell(0.5, 0.7, 0.9).best == "replanned"
    assert _cell(0.5, 0.9, 0.90001).best == "default"
    assert _cell(0.9, 0.9, 0.90001).best == "saved"


def test_the_table_shows_a_cell_in_a_line() -> None:
    """Efficiencies are in percent."""
    header, row = render([_cell(0.5, 0.7, 0.9)]).splitlines()
    columns = ["ranks", "bandwidth", "saved", "default", "replanned", "buckets", "best"]
    assert header.split() == columns
    assert row.split() == ["8", "10gbit", "50.0%", "70.0%", "90.0%", "3", "replanned"]


# ---- The command line ---------------------------------------------------------------------------


def test_sweep_has_a_grid_by_default(plan_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 world sizes and 3 bandwidths.

    Below it stands what the percentages are, and for how many ranks the plan in the file is.
    """
    assert main(["sweep", plan_path]) == 0
    *cells, empty, title, legend, _, saved = capsys.readouterr().out.splitlines()
    assert len(cells) == 1 + 4 * 3
    assert not empty
    assert title.startswith("efficiency (the iteration of one rank alone")
    assert legend.startswith("  saved: ")
    assert saved.endswith("for 2 ranks")


def test_sweep_prints_the_cells_as_json(plan_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each cell is an object, with its best."""
    grid = ("--world-sizes", "4,8", "--bandwidths", "1gbit,25gbit", "--json")
    assert main(["sweep", plan_path, *grid, "--algorithm", "tree"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [(cell["world_size"], cell["bytes_per_s"]) for cell in cells] == [
        (4, 125e6), (4, 3.125e9), (8, 125e6), (8, 3.125e9),
    ]  # fmt: skip
    assert {cell["best"] for cell in cells} <= {"saved", "default", "replanned"}


def test_simulate_prints_the_simulation(
    plan_path: str, plan: BucketPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, of the plan's own ring; and as JSON, of given links and stragglers."""
    assert main(["simulate", plan_path, "--world-size", "16"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{simulate(plan, world_size=16)}\n")
    assert shown.endswith("for 2 ranks\n")
    text = "--bandwidth 200gbit --algorithm hierarchical --ranks-per-node 8 --latency-us 10"
    slow = ("--stragglers", "0.02", "--seed", "7")
    assert main(["simulate", plan_path, "--world-size", "16", *text.split(), *slow, "--json"]) == 0
    network = Network(latency_s=10e-6, bytes_per_s=25e9, algorithm="hierarchical", ranks_per_node=8)
    expected = simulate(
        plan, world_size=16, network=network, stragglers=Stragglers(mean_delay=0.02, seed=7)
    )
    printed = json.loads(capsys.readouterr().out)
    assert printed["cost"]["startup_s"] == pytest.approx(expected.cost.startup_s)
    assert (printed["world_size"], printed["plan_world_size"]) == (16, 2)
    assert printed["efficiency"] == pytest.approx(expected.efficiency)


def test_commands_keep_the_plans_interference(
    plan_path: str, plan: BucketPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    """What allreduces take from computation is a matter of the machine, so other links keep it."""
    cost = AllreduceCost(startup_s=1e-4, s_per_byte=8e-9, interference=0.25)
    plan_buckets(plan.profile, cost, 2).save(plan_path)
    main(["simulate", plan_path, "--world-size", "16", "--bandwidth", "1gbit", "--json"])
    assert json.loads(capsys.readouterr().out)["cost"]["interference"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required"),
        (("sweep", "{plan}", "--world-sizes", "2,x"), "'x' is no whole number"),
        (("sweep", "{plan}", "--world-sizes", "0"), "'0' is no whole number"),
        (("sweep", "{plan}", "--bandwidths", "10GB/s"), "'10GB/s'"),
        (("sweep", "{plan}", "--latency-us", "-1"), "latency_s is -1e-06"),
        (("sweep", "{plan}", "--ranks-per-node", "0"), "'0' is no whole number"),
        (("sweep", "{plan}", "--stragglers", "-1"), "mean_delay is -1.0"),
        (("sweep", "{plan}", "--algorithm", "star"), "star"),
        (("simulate", "{plan}"), "--world-size"),
        (("simulate", "{plan}", "--world-size", "0"), "'0' is no whole number"),
        (("simulate", "{plan}", "--world-size", "8", "--latency-us", "5"), "without --bandwidth"),
        (("simulate", "{broken}", "--world-size", "8"), "it has no 'version'"),
    ],
)
def test_bad_arguments_exit_with_2_and_a_message(
    arguments: tuple[str, ...],
    message: str,
    plan_path: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message has the argument, or the value and what is valid."""
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(SystemExit) as stopped:
        main([argument.format(plan=plan_path, broken=broken) for argument in arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
