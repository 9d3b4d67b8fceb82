"""The command line: the output of each command, as text and as JSON, and its exit status."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import __version__, _torch, config
from ddpopt.cli import bench, commands, doctor, main
from ddpopt.cli import help as help_of_topics
from ddpopt.cli.inputs import VARIABLES, Loaded, find_factory, one_rank_group, torchrun_group
from ddpopt.cli.main import find_command
from ddpopt.cli.output import InputError
from ddpopt.errors import Reason, TorchDriftError
from ddpopt.planning.costs import AllreduceCost, Gradient, Profile
from ddpopt.planning.plan import plan_buckets
from tests.support.documents import ROOT, environment
from tests.support.models import MLP

MODELS = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x).relu()
        return x * scale

class Makers:
    @staticmethod
    def small():
        print("a factory may print")
        return MLP(), torch.ones(2, 64)

def by_name():
    return MLP(), {"x": torch.ones(2, 64), "scale": 2.0}

def container():
    return nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)

def frozen():
    return MLP().requires_grad_(False), torch.ones(2, 64)

def alone():
    return MLP()

def mismatched():
    return MLP(), torch.ones(2, 63)


def wrapped():
    return DistributedDataParallel.__new__(DistributedDataParallel), torch.ones(2, 64)

def lost():
    with torch.device("meta"):
        return MLP(), torch.ones(2, 64)

def broken():
    raise KeyError("no such weights")

def failing_on_rank_1():
    from ddpopt.cli import bench
    bench._LONGEST_WAIT_S = 2.0
    model, num_forwards = MLP(), 0

    def fail(*_):
        nonlocal num_forwards
        num_forwards += 1
        if torch.distributed.get_rank() == 1 and num_forwards == 3:
            raise torch.OutOfMemoryError("no memory on this rank")

    model.register_forward_pre_hook(fail)
    return model, torch.ones(2, 64)

def failing_in_backward():
    # At another place of it on each rank.
    model, num_gradients = MLP(), 0

    def fail(_):
        nonlocal num_gradients
        num_gradients += 1
        if num_gradients == 3:
            raise torch.OutOfMemoryError("no memory")

    layer = 0 if torch.distributed.get_rank() else 5
    model.layers[layer].weight.register_hook(fail)
    return model, torch.ones(2, 64)

def slow():
    import sys, time
    print("begun", file=sys.stderr, flush=True)
    time.sleep(600)

not_callable = 3
"""
SMALL = "models_of_mine.py:Makers.small"
CAP = ("--bucket-cap-mb", "0.0316")  # three buckets


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of models."""
    (tmp_path / "models_of_mine.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan_path(tmp_path: Path) -> str:
    """The path of a plan in a file."""
    gradients = tuple(Gradient(name=f"p{i}", num_bytes=2**20, ready_s=0.01 * i) for i in range(4))
    cost = AllreduceCost(startup_s=1e-4, s_per_byte=8e-9)
    plan = plan_buckets(Profile(gradients=gradients, backward_s=0.04), cost, world_size=2)
    plan.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddpopt", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


def _run_on_two_ranks(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "ddpopt", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,  # a hang fails
    )


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error of a command, which has to exit with status 2 and to print no result."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


# ---- explain ----------------------------------------------------------------------------------


def test_explain_needs_no_process_group_and_prints_json_alone(folder: Path) -> None:
    """The module is in the current folder, and its factory prints, which goes to stderr."""
    done = _run("explain", "models_of_mine:Makers.small", *CAP, "--json")
    assert done.returncode == 0, done.stderr
    explained = json.loads(done.stdout)
    assert explained["format"] == "ddpopt explanation 1"
    assert [len(graph["sections"]) for graph in explained["graphs"]] == [3]
    assert [bucket["is_as_planned"] for bucket in explained["buckets"]] == [True] * 3
    assert "a factory may print" in done.stderr


def test_explain_prints_the_explanation(
    one_rank: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inputs may be keyword arguments; the other split is an option; a group stays in place."""
    arguments = ("explain", "models_of_mine.py:by_name", *CAP, "--split", "backward")
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "MLP: 3 DDP buckets" in text
    assert re.search(r"3 backward sections for 3 DDP buckets of 97\.5 KiB", text)
    assert dist.is_initialized()


def test_explain_predicts_for_a_cluster(
    one_rank: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DDP's buckets are beside the best ones, in the text and in the JSON."""
    cluster = ("--world-size", "8", "--bandwidth", "1gbit")
    assert main(("explain", SMALL, *CAP, *cluster)) == 0
    text = capsys.readouterr().out
    assert "8 ranks at 1gbit" in text
    assert re.search(r"^ +DDP's +3 ", text, re.MULTILINE)
    assert re.search(r"^ +best +\d ", text, re.MULTILINE)
    assert main(("explain", SMALL, *CAP, *cluster, "--json")) == 0
    explained = json.loads(capsys.readouterr().out)
    ddp, best = (explained["prediction"][name] for name in ("ddp", "best"))
    assert ddp["world_size"] == best["world_size"] == 8
    assert len(ddp["timeline"]["buckets"]) == 3
    assert best["timeline"]["iteration_s"] <= ddp["timeline"]["iteration_s"]
    assert explained["predicted"]["backward_s"] > 0


def test_explain_writes_a_page(
    one_rank: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the page's name."""
    assert main(("explain", SMALL, *CAP, "--html", "page.html")) == 0
    assert "written: page.html" in capsys.readouterr().out
    assert "layers.5.weight" in (folder / "page.html").read_text()


def test_explain_replaces_a_page_but_no_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes before the model is made."""
    (folder / "page.html").mkdir()
    error = _refused(capsys, "explain", "models_of_mine.py:broken", "--html", "page.html")
    assert "page.html cannot be written: it is a folder, a pipe or a device" in error
    (folder / "page.html").rmdir()
    (folder / "page.html").write_text("an earlier one")
    assert main(("explain", SMALL, *CAP, "--html", "page.html")) == 0
    assert "an earlier one" not in (folder / "page.html").read_text()


def test_explain_fails_where_nothing_is_compiled(
    one_rank: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dynamo skips a container of torch's right under DDP; the text says so."""
    assert main(("explain", "models_of_mine.py:container")) == 1
    assert "compiled nothing of this DistributedDataParallel(Sequential)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models_of_mine",), "'models_of_mine' names no factory"),
        (("models_of_yours:small",), "there is no module 'models_of_yours'"),
        (("models_of_yours.py:small",), "there is no file models_of_yours.py"),
        (("models_of_mine.py:Maker",), "has no 'Maker'; did you mean Makers?"),
        (("models_of_mine.py:not_callable",), "is a int; a factory is a function"),
        (("models_of_mine.py:broken",), "KeyError: 'no such weights' ("),
        (("models_of_mine.py:alone",), "returned MLP; it must return two things"),
        (("models_of_mine.py:wrapped",), "returned a DistributedDataParallel"),
        (("models_of_mine.py:frozen",), "no parameter of the model"),
        (("models_of_mine.py:lost",), "is on the meta device"),
        (("syntax.py:small",), "importing syntax.py raised SyntaxError"),
        ((SMALL, "--inner", "no_such"), "'no_such', which is no backend"),
        ((SMALL, "--split", "sideways"), "'split' is 'sideways'"),
        ((SMALL, "--bucket-cap-mb", "0"), "'0' is no size above 0 in MiB"),
        ((SMALL, "--world-size", "8"), "give both or neither"),
        ((SMALL, "--world-size", "8", "--bandwidth", "10GB/s"), "'10GB/s'"),
        (("models_of_mine.py:mismatched",), "a step of models_of_mine.py:mismatched raised"),
        ((SMALL, "--html", "page.txt"), "does not end in .html"),
        ((SMALL, "--html", "nowhere/page.html"), "there is no folder"),
    ],
)
def test_explain_refuses_bad_input_and_names_it(
    arguments: tuple[str, ...],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error has the value, the limit or the remedy."""
    (folder / "syntax.py").write_text("def small(:\n")
    assert message in _refused(capsys, "explain", *arguments)


def test_a_factory_may_be_called_again(folder: Path) -> None:
    """A factory's calls make a model each."""
    make = find_factory(SMALL)
    assert make().model is not make().model


# ---- simulate and sweep: see planning/test_sweep.py -------------------------------------------


@pytest.mark.slow
def test_simulate_and_sweep_import_no_more_than_they_need(plan_path: str) -> None:
    """Neither command imports graphs, the backend, other commands, or rich."""
    script = (
        "import sys; from ddpopt.cli import main; main(sys.argv[1:]); "
        "print(*sorted(m for m in sys.modules if m.startswith(('ddpopt.', 'rich', 'networkx'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "sweep", plan_path, "--world-sizes", "4"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    needed = {f"ddpopt.cli.{name}" for name in ("main", "output", "commands", "inputs")}
    assert {m for m in loaded if m.startswith("ddpopt.cli.")} == needed
    assert not loaded & {"ddpopt.backend", "networkx", "rich"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "plan.json is not JSON"),
        ("{}", "plan.json: it has no 'version'"),
        ('{"version": 1, "sizes": []}', "plan.json: the plan has no 'profile'"),
    ],
)
def test_simulate_refuses_what_is_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    """The exit status is 2, and the error has the file and the place."""
    path = tmp_path / "plan.json"
    path.write_text(content)
    assert message in _refused(capsys, "simulate", str(path), "--world-size", "4")


# ---- calibrate and bench ----------------------------------------------------------------------


@pytest.mark.parametrize("command", [("calibrate",), ("bench", SMALL)])
def test_without_torchrun_a_command_for_ranks_says_how_to_start(
    command: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error names the variables that are missing."""
    monkeypatch.delenv("RANK", raising=False)
    error = _refused(capsys, *command)
    assert "RANK" in error
    assert f"torchrun --nproc-per-node 2 -m ddpopt {' '.join(command)}" in error


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "named"),
    [("0", 0, "'nccl'"), ("first", 2, "'first'"), ("9" * 20, 2, "'9{20}'"), ("2", 2, "has 2 GPUs")],
)
def test_a_group_by_nccl_needs_a_gpu_for_each_process(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, num_gpus: int, named: str
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(InputError, match=named), torchrun_group("nccl", "bench"):
        pass


@pytest.mark.slow
def test_calibrate_prints_the_cost_once(folder: Path) -> None:
    """Rank 0 alone prints it, and writes it to a file."""
    done = _run_on_two_ranks("calibrate", "--json", "--output", "cost.json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["backend"], printed["world_size"]) == ("gloo", 2)
    # On busy processors the rate may come out as 0, and all of the time as start-up.
    assert AllreduceCost.from_dict(printed["cost"], "cost").seconds(2**20) > 0
    assert json.loads((folder / "cost.json").read_text()) == printed


@pytest.mark.nightly
def test_bench_measures_all_peers_side_by_side(folder: Path) -> None:
    """The in-tree optimizer refuses caps this small; that is told, and the others go on."""
    sizes = ("--caps", "default,0.03", "--steps", "1", "--rounds", "2")
    done = _run_on_two_ranks("bench", SMALL, "--inner", "aot_eager", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert (measured["world_size"], measured["inner"]) == (2, "aot_eager")
    peers: dict[float | None, list[str]] = {None: [], 0.03: []}
    for result in measured["results"]:
        peers[result["cap_mb"]].append(result["peer"])
    names = ["eager", "intree", "nosplit", "forward", "backward", "auto"]
    assert peers[None] == names
    assert peers[0.03] == [name for name in names if name != "intree"]
    (failure,) = measured["failures"]
    assert (failure["peer"], failure["cap_mb"]) == ("intree", 0.03)
    for result in measured["results"]:
        assert 0 < result["fastest_s"] <= result["step_s"] <= result["slowest_s"]
        assert result["throughput_of_eager"] > 0
        assert (result["throughput_of_intree"] is None) == (result["cap_mb"] is not None)
        assert bool(result["tuning"]) == (result["peer"] == "auto")


@pytest.mark.slow
def test_bench_prints_a_table(folder: Path) -> None:
    """The table has the peers that were asked for; inputs may be keyword arguments."""
    peers = ("--peers", "eager,backward", "--inner", "aot_eager", "--steps", "1", "--rounds", "1")
    done = _run_on_two_ranks("bench", "models_of_mine:by_name", *peers)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (gloo), inner compiler aot_eager, 1 round of 1 step\n" in done.stdout
    times = r"(?: +[\d.]+){3}"
    assert re.search(rf"^ +default +eager{times} +1\.00 +-  DDP, not com", done.stdout, re.M)
    assert re.search(rf"^ +default +backward{times} +[\d.]+ +-  ddpopt", done.stdout, re.M)


@pytest.mark.slow
def test_bench_ends_if_one_rank_alone_cannot_train(folder: Path) -> None:
    """Rank 0 waits for the gradients of rank 1, which says so and ends; torchrun ends rank 0."""
    done = _run_on_two_ranks("bench", "models_of_mine:failing_on_rank_1", "--peers", "eager")
    assert done.returncode == 1
    here = "(here it raised OutOfMemoryError: no memory on this rank)"
    assert f"training eager {here}: rank 0 did not come within 2 s; look" in done.stderr
    assert "[rank" not in done.stderr  # torch marks tracebacks so


@pytest.mark.slow
def test_bench_ends_if_ranks_fail_in_a_backward(folder: Path) -> None:
    """One may have launched an allreduce that another has not, so the next ones would not meet."""
    caps = ("--peers", "eager", "--caps", "0.03")
    done = _run_on_two_ranks("bench", "models_of_mine:failing_in_backward", *caps)
    assert done.returncode == 1
    assert ": OutOfMemoryError: no memory, while gradients were reduced; look" in done.stderr
    assert "[rank" not in done.stderr  # torch marks tracebacks so


@pytest.mark.slow
@pytest.mark.parametrize("names", [("intree", "nosplit"), ("nosplit", "intree")])
def test_bench_gives_each_model_code_of_its_own(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """Dynamo would give one model the graphs of another, which were split otherwise."""
    compiled: list[Any] = []
    backend = _torch.lookup_backend("aot_eager")

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return backend(graph, inputs)

    monkeypatch.setattr(_torch, "lookup_backend", lambda _name: note)
    trainees, counts = [], {}
    for name in names:
        compiled.clear()
        loaded = Loaded(MLP(8, 512), torch.ones(2, 512))
        trainee, error = bench._admit(name, 2.0, "aot_eager", loaded)
        assert not error
        trainees.append(trainee)  # models stay while others are compiled
        counts[name] = len(compiled)
    assert counts["nosplit"] == 1
    assert counts["intree"] > 1


def test_bench_refuses_a_model_that_is_compiled_already() -> None:
    """The training that counts as eager would not be."""
    model = MLP(1)
    model.compile(backend="eager")
    with pytest.raises(InputError, match="is compiled already"):
        bench._refuse_compiled(Loaded(model, ()))


def test_bench_refuses_an_unknown_peer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names those that there are."""
    error = _refused(capsys, "bench", SMALL, "--peers", "eager,fast")
    assert "there is no peer 'fast'; there are eager, intree" in error


# ---- process groups ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_group_outlives_the_ddp_module_that_an_exception_holds() -> None:
    """A Reducer that is freed after its group, and is the last to hold it, may hang.

    A new process shows it, since this one may have a group already.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path}; from tests.cli import test_cli; "
        "test_cli.leave_by_an_exception()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def leave_by_an_exception() -> None:
    with pytest.raises(ValueError, match="broken") as raised:
        _fail_beside_ddp()
    group = weakref.ref(raised.value.args[0].process_group)
    assert not dist.is_initialized()
    del raised
    gc.collect()
    assert group() is not None


def _fail_beside_ddp() -> None:
    with one_rank_group():
        raise ValueError(DistributedDataParallel(MLP()), "broken")


# ---- doctor -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_doctor_finds_that_training_can_be_split_here() -> None:
    """The torch of the tests' environment has every private name."""
    done = _run("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["can_split"] is True
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("torch", "private names", "process groups", "split forward", "split backward"):
        assert checks[name]["is_ok"], checks[name]
    assert checks["split backward"]["detail"].startswith("2 sections for 2 buckets")
    assert report["missing_names"] == {}


@pytest.mark.slow
def test_doctor_tells_what_is_switched_off_or_misspelt() -> None:
    """Training is not split then, which is status 1; each problem has a remedy."""
    done = _run("doctor", DDPOPT_ENABLED="0", DDPOPT_BUCKET="auto")
    assert done.returncode == 1
    assert re.search(r"DDPOPT_ENABLED +problem  0 switches splitting off; unset it", done.stdout)
    assert "DDPOPT_BUCKET" in done.stdout
    assert "is not read; ddpopt reads DDPOPT_BUCKETS" in done.stdout
    assert "training can not be split here" in done.stdout


def test_doctor_names_what_torch_has_moved(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Doctor names a private name that is gone, with the loss, and a release never tested."""
    monkeypatch.delattr("torch._C._current_graph_task_id")
    monkeypatch.setattr(doctor, "_train", lambda _split: ())
    assert main(("doctor",)) == 1
    text = capsys.readouterr().out
    assert re.search(
        r"private names +problem  1 missing: torch\._C\._current_graph_task_id \(lost: \w", text
    )
    monkeypatch.setattr(torch, "__version__", "3.1.0")
    assert main(("doctor",)) == 1
    text = capsys.readouterr().out
    newer = r"torch +problem  3\.1\.0 is newer than what was tested: tested are .*; install torch"
    assert re.search(newer, text)
    assert text.endswith("which options to train with: ddpopt help options\n")


def test_doctor_finds_that_nothing_trains_without_a_compiler(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler is that of CXX, which Inductor needs where there is no GPU."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(doctor, "_try", lambda split: doctor.Check(split, "not tried"))
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert main(("doctor",)) == (0 if has_gpu else 1)
        text = capsys.readouterr().out
        assert re.search(r"C\+\+ compiler +problem  there is no no-such-compiler, .* set CXX", text)
        seen = "can not be split here; see C++ compiler above" in text
        assert seen is not has_gpu


def test_names_of_ddp_are_looked_for_where_there_is_one(one_rank: None) -> None:
    """Names of DDP's Reducer are too; names of modules are looked for always."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    without, with_ddp = (
        {str(row): is_found for row, is_found in doctor.find_names(d).items()} for d in (None, ddp)
    )
    assert "torch._guards.TracingContext" in without
    prefix = "DistributedDataParallel."
    assert not any(name.startswith(prefix) for name in without)
    for name in (f"{prefix}bucket_bytes_cap", f"{prefix}_ddp_init_helper"):
        assert with_ddp[name]
    assert with_ddp["Reducer._set_static_graph"]


# ---- the program ------------------------------------------------------------------------------


def test_the_command_is_installed() -> None:
    """The command begins in a module that imports nothing, see there."""
    (script,) = metadata.entry_points(group="console_scripts", name="ddpopt")
    assert script.value == "ddpopt_command:main"
    assert callable(script.load())


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(plan_path: str) -> None:
    """`ddpopt sweep plan.json | head -1` writes nothing on stderr."""
    command = [sys.executable, "-m", "ddpopt", "sweep", plan_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.slow
def test_ctrl_c_while_ddpopt_is_imported_shows_no_traceback(tmp_path: Path) -> None:
    """The import takes seconds, of torch's; here it takes as long as the test needs."""
    (tmp_path / "torch.py").write_text(
        "import sys, time\nprint('begun', file=sys.stderr, flush=True)\ntime.sleep(600)\n"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "src" / "ddpopt_command.py"), "doctor"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == 130


@pytest.mark.slow
def test_ctrl_c_exits_with_130_and_no_traceback(folder: Path) -> None:
    """Ctrl-C is pressed while a model is made."""
    command = [sys.executable, "-m", "ddpopt", "explain", "models_of_mine.py:slow"]
    # Who runs tests in the background ignores SIGINT, which would be inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_work_that_fails_exits_with_1_and_the_message(
    plan_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Work fails through no fault of the input."""

    def fail(*_: Any) -> None:
        raise TorchDriftError("torch has no such name")

    monkeypatch.setattr(commands, "run_simulate", fail)
    assert main(("simulate", plan_path, "--world-size", "4")) == 1
    assert capsys.readouterr().err == "ddpopt: torch has no such name\n"


def _on_a_terminal(*arguments: str) -> str:
    """Return the output of a command whose stdout is a terminal."""
    terminal, stdout = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "CXX": "no-such-compiler"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpopt", *arguments],
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )
    os.close(stdout)
    text = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        if not part:
            break
        text += part
    os.close(terminal)
    process.communicate()
    return text.decode()


@pytest.mark.slow
def test_on_a_terminal_tables_are_drawn(folder: Path) -> None:
    """Rich draws them, where it is installed; JSON is JSON there too."""
    pytest.importorskip("rich")
    text = _on_a_terminal("doctor")
    assert "┃" in text
    assert "\x1b[" in text
    assert json.loads(_on_a_terminal("doctor", "--json"))["format"] == "ddpopt doctor 1"


def test_each_command_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """`ddpopt --help` names all, and each has a help of its own."""
    for command in ("", "explain", "simulate", "sweep", "calibrate", "bench", "doctor", "help"):
        with pytest.raises(SystemExit) as stopped:
            main((*command.split(), "--help"))
        assert stopped.value.code == 0
        assert "Exit status: 0 fine" in capsys.readouterr().out


def test_every_command_can_be_imported() -> None:
    """A name of `module:function` in main.py leads to a command."""
    source = inspect.getsource(sys.modules["ddpopt.cli.main"])
    names = re.findall(r'"(\w+:run\w*)"', source)
    assert len(names) == 7
    assert all(callable(find_command(name)) for name in names)


@pytest.mark.parametrize("topic", [None, *help_of_topics.TOPICS])
def test_help_explains_what_messages_refer_to(
    topic: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a topic it lists all; each has a title in that list, and a text for a terminal."""
    assert main(["help", *filter(None, [topic])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 100
    if topic is None:
        assert all(f"  {name} " in "\n".join(lines) for name in help_of_topics.TOPICS)


def test_help_has_every_variable_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    main(["help", "variables"])
    main(["help", "reasons"])
    text = capsys.readouterr().out
    assert [name for name in config.VARIABLES if name not in text] == []
    assert [reason.name for reason in Reason if reason.name not in text] == []


def test_an_unknown_topic_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no topic 'speed'; there are options," in _refused(capsys, "help", "speed")


def test_no_message_names_a_file_that_users_do_not_have() -> None:
    """Texts of the source that are no docstrings: of errors, warnings and commands."""
    found: list[str] = []
    for path in sorted((ROOT / "src" / "ddpopt").rglob("*.py")):
        tree = ast.parse(path.read_text())
        statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        docstrings = {id(value) for value in statements if isinstance(value, ast.Constant)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and id(node) not in docstrings
            if is_text and re.search(r"docs/|\w\.md\b|examples/|tests/", str(node.value)):
                found.append(f"{path.name}:{node.lineno}: {node.value}")
    assert found == []


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ddpopt {__version__}\n"


def test_an_error_about_a_file_shows_no_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "nowhere.json", "--world-size", "4"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("ddpopt: error: the plan nowhere.json cannot be read")
