"""The examples, run as a user runs them; models of those that take long are smaller."""

from __future__ import annotations

import gc
import re
import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from tests.support.documents import ROOT, command_of, run_command
from tests.support.fake_clock import FakeClock
from tests.support.models import MLP, WAYS
from tests.support.on_ranks import on_ranks
from tests.support.ranks import TIMEOUT_S

sys.path.insert(0, str(ROOT / "examples"))

import minimal
import slow_link
import train_gpt

# Else torchrun 2.13 keeps its store, in which restarted ranks find addresses of the dead.
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_TORCHRUN = f"{_OWN_STORE} torchrun --standalone --nproc-per-node 2"


@on_ranks(2)
def test_minimals_training_ends_with_equal_parameters() -> None:
    """The example asserts it; starting its processes takes longer than all else that it does."""
    minimal.train(dist.get_rank())


def test_minimal_trains_two_ranks_to_equal_parameters() -> None:
    """The line that says so is printed after a comparison."""
    text = run_command(command_of("examples/minimal.py"))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert losses == sorted(losses, reverse=True)
    assert "all 2 ranks hold the same 110 parameters" in text


def test_train_gpt_learns_and_equals_its_eager_twin(tmp_path: Path) -> None:
    """The program prints a plan, a falling loss, a sample, overlap and a rounding difference.

    The link is an emulated one, beside which the time of each bucket is known nevertheless.
    """
    text = run_command(
        f"{_TORCHRUN} examples/train_gpt.py --steps 20 --layers 1 --width 192 --heads 2 "
        "--context 32 --bucket-cap-mb 1 --inner aot_eager --compare eager --sample 20 "
        f"--network 1gbit --overlap {tmp_path}/pages/overlap.html"
    )
    assert re.search(r"\d+ backward sections for \d+ DDP buckets", text)
    assert "loss fell" in text
    assert float(re.search(r"\n([\d.e-]+); in the first", text).group(1)) < 1e-3
    assert "sample:\ndef " in text
    assert "the network is EMULATED" in text
    table = re.findall(r"^(.{55}) +(\d+) +(\d+)$", text, re.MULTILINE)
    assert [name.split()[0].strip(",") for name, _, _ in table] == [
        "torch.compile",
        "PyTorch's",
        "ddpopt",
        "ddpopt",
    ]
    for _, total, exposed in table:
        assert 0 < int(exposed) < int(total)
    assert re.search(r"^buckets (stay|change)", text, re.MULTILINE)
    page = (tmp_path / "pages" / "overlap.html").read_text()
    assert "<html" in page
    assert "the profiler saw" not in page
    assert "all ranks hold bitwise equal parameters" in text


@on_ranks(2)
def test_values_pass_a_slow_link_one_after_the_other(rank: int) -> None:
    """Three are sent at once, of 40 ms each, two more one by one; an error reaches who waits."""
    may_wake_up, sleeps_s = threading.Semaphore(0), []

    def sleep(seconds: float) -> None:  # of the link's thread
        assert may_wake_up.acquire(timeout=TIMEOUT_S)
        sleeps_s.append(seconds)
        clock.pass_time(seconds)

    clock = FakeClock(on_sleep=sleep)
    with (
        clock.replacing_time_of(slow_link),
        mock.patch.object(dist, "all_reduce", dist.all_reduce),  # which `emulate` replaces
    ):
        slow_link.emulate(slow_link.parse_gbit("50mbit"))
        values = [torch.full((62_500,), float(rank + 1)) for _ in range(3)]
        works = [dist.all_reduce(value, async_op=True) for value in values]
        for work, value in zip(works, values, strict=True):
            assert not work.is_completed()
            assert value.eq(rank + 1).all()
            may_wake_up.release()
            work.wait()
            assert value.eq(3).all()
        # Had they passed beside each other, the first sleep would have been all.
        assert sleeps_s == pytest.approx([0.040] * 3, rel=0.01)
        may_wake_up.release()
        with pytest.raises(TypeError):
            dist.all_reduce(values[0], "no operation")
        may_wake_up.release()
        dist.all_reduce(values[0])
        assert values[0].eq(6).all()


def test_a_rate_that_is_none_of_tcs_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast'"):
        slow_link.parse_gbit("fast")


def test_data_parallel_trains_as_one_device() -> None:
    """Two replicas end with the parameters of one device, up to rounding."""
    text = run_command(command_of("examples/data_parallel.py"))
    assert float(re.search(r"differ by at most ([\d.e+-]+)", text).group(1)) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["qadam", "async"])
def test_train_gpt_learns_with_an_algorithm_and_ends_with_equal_ranks(algorithm: str) -> None:
    """Ranks whose weights were different in training have equal ones when it is detached."""
    text = run_command(
        f"{_TORCHRUN} examples/train_gpt.py --algorithm {algorithm} --steps 40 --layers 1 "
        "--width 32 --heads 2 --context 32 --inner aot_eager --sync-interval-ms 20 "
        "--warmup-steps 5 --sample 0"
    )
    assert "loss fell" in text
    assert "all ranks hold bitwise equal parameters" in text


@on_ranks(2)
def test_train_gpt_takes_every_algorithm_that_it_offers() -> None:
    """An algorithm trains for a step, with the program's own arguments."""
    for algorithm in train_gpt.ALGORITHMS:
        with mock.patch.object(sys, "argv", ["train_gpt.py", "--algorithm", algorithm]):
            args = train_gpt.parse_arguments()
        ddp = DistributedDataParallel(MLP(1))
        optimizer, handle = train_gpt.start_algorithm(ddp, args)
        ddp(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert (handle is None) == (algorithm == train_gpt.ALLREDUCE)
        if handle is not None:
            handle.detach()


# ---- Restarts: what is lost is done again, bitwise --------------------------------------------


def _train_with_checkpoint(path: Path, place: str) -> tuple[str, dict[str, Any]]:
    """Train 24 steps, saving each eighth, with a rank killed at `place`; return the last save."""
    text = run_command(
        f"{_TORCHRUN} --max-restarts 3 tests/system/dying_gpt.py {place} --steps 24 --layers 1 "
        "--width 32 --heads 2 --context 32 --inner aot_eager --bucket-cap-mb 0.02 --sample 0 "
        f"--checkpoint {path} --checkpoint-every 8"
    )
    assert "all ranks hold bitwise equal parameters" in text
    return text, torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last checkpoint of a run in which nobody is killed."""
    text, saved = _train_with_checkpoint(tmp_path_factory.mktemp("calm") / "run.pt", "nowhere")
    assert "going on after" not in text
    return saved


@pytest.mark.parametrize("place", ["write", pytest.param("step", marks=pytest.mark.nightly)])
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    tmp_path: Path, undisturbed: dict[str, Any], place: str
) -> None:
    """Torchrun restarts; rank 1 dies in step 13, or rank 0 with half of a checkpoint written.

    The file is then the one before; losses and all that is saved end bitwise as undisturbed.
    """
    text, saved = _train_with_checkpoint(tmp_path / "run.pt", place)
    assert "going on after step 8 of" in text
    assert len(saved["losses"]) == 24
    _assert_bitwise_equal(saved, undisturbed)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def _assert_bitwise_equal(actual: Any, expected: Any) -> None:
    leaves, structure = pytree.tree_flatten(actual)
    others, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for leaf, other in zip(leaves, others, strict=True):
        assert type(leaf) is type(other)
        assert torch.equal(leaf, other) if isinstance(leaf, torch.Tensor) else leaf == other


# ---- How programs end -------------------------------------------------------------------------

_OUTLIVES = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
dist.destroy_process_group()
"""


def test_a_program_whose_ddp_module_outlives_its_group_is_found(tmp_path: Path) -> None:
    """Such a program seldom hangs; all programs of documents and of these tests end in order."""
    (tmp_path / "late.py").write_text(_OUTLIVES)
    with pytest.raises(AssertionError, match="1 DDP modules outlive their process group"):
        run_command("python late.py", tmp_path)
    (tmp_path / "good.py").write_text(_OUTLIVES.replace("dist.destroy", "del ddp; dist.destroy"))
    run_command("python good.py", tmp_path)


def _fail_in_training(way: str, split: str) -> None:
    """Train a step and raise in the next, with references to what should die."""
    module = MLP()
    model = WAYS[way](module, lambda: _options(split), {"bucket_cap_mb": 0.03})
    ddp = model if isinstance(model, DistributedDataParallel) else model._orig_mod
    model(torch.ones(2, 64)).sum().backward()
    assert len(ddpopt.explain(ddp).cuts[0].sections) > 1
    loss = model(torch.ones(2, 64)).sum()
    loss.register_hook(lambda _: 1 / 0)
    references = [weakref.ref(ddp), weakref.ref(ddp.reducer), weakref.ref(module)]
    try:
        loss.backward()
    except ZeroDivisionError as error:
        raise RuntimeError(references) from error


def _options(split: str) -> dict[str, Any]:
    return {"backend": "ddpopt", "options": {"inner": "aot_eager", "split": split}}


@pytest.mark.parametrize("split", ["forward", "backward"])
@pytest.mark.parametrize("way", list(WAYS)[:4])
def test_a_collection_frees_what_a_function_compiled_and_trained(
    one_rank: None, way: str, split: str
) -> None:
    """So are the DDP module and its Reducer, after an exception too, with no reset of Dynamo."""
    with pytest.raises(RuntimeError) as raised:
        _fail_in_training(way, split)
    references = raised.value.args[0]
    del raised
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
