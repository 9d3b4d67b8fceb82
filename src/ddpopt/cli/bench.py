"""`ddpopt bench`: your own model, trained in each way side by side in the same processes.

The ways take turns, A B C A B C, so that the machine's drift affects all. All models stay compiled
until the end, since Dynamo can only forget all of them at once.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _torch
from ddpopt._text import count, format_ms, quote
from ddpopt.cli.inputs import Loaded, find_factory, torchrun_group
from ddpopt.cli.output import InputError, Report, Screen, Table
from ddpopt.errors import PeerError
from ddpopt.options import resolve_options
from ddpopt.planning import tuner
from ddpopt.planning.batch import call_model, find_loss
from ddpopt.ranks.meetings import JointDecision, next_key
from ddpopt.steps.clock import Clock

_BASELINES = ("eager", "intree")
_WARM_STEPS = 4  # to compile, let DDP form its buckets, and compile for those
_MOST_STEPS = 100  # until better buckets are found
_RECOMPILE_LIMIT = 200
_ERROR_LENGTH = 300
# How long a rank that cannot train waits for the others, which may still be compiling.
_LONGEST_WAIT_S = 300.0


class Peer(NamedTuple):
    """A way to train: `options` are ddpopt's, None for the inner compiler alone."""

    description: str
    is_compiled: bool = True
    options: Mapping[str, Any] | None = None
    optimize_ddp: bool = True


PEERS = {
    "eager": Peer("DDP, not compiled", is_compiled=False),
    "intree": Peer("torch.compile as it comes, with PyTorch's own DDPOptimizer"),
    "nosplit": Peer("torch.compile with optimize_ddp = False: one graph", optimize_ddp=False),
    "forward": Peer("ddpopt, split: forward", options={"split": "forward"}),
    "backward": Peer("ddpopt, split: backward", options={"split": "backward"}),
    "auto": Peer("ddpopt, buckets: auto", options={"buckets": "auto"}),
}


def run(args: argparse.Namespace, screen: Screen) -> Report | None:
    """Measure; only rank 0 reports."""
    names = [name.strip() for name in args.peers.split(",")] if args.peers else list(PEERS)
    for name in names:
        if name not in PEERS:
            raise InputError(f"there is no peer {quote(name)}; there are {', '.join(PEERS)}")
    resolve_options(None, {"inner": args.inner})  # reports a bad one before a model is made
    with torchrun_group(args.backend, f"bench {args.factory}") as backend:
        results, failures = _measure(args, list(dict.fromkeys(names)), screen)
        rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank:
        return None
    data = {
        "format": "ddpopt bench 1",
        "world_size": world_size,
        "backend": backend,
        "inner": args.inner,
        "steps": args.steps,
        "rounds": args.rounds,
        "results": results,
        "failures": failures,
    }
    # Peers without options are not ddpopt's: it is no failure of ours if one cannot train.
    has_failed = any(PEERS[failure["peer"]].options is not None for failure in failures)
    return Report(data=data, parts=_parts(data), status=1 if has_failed or not results else 0)


def _measure(
    args: argparse.Namespace, names: Sequence[str], screen: Screen
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results and the failures, as `--json` prints them.

    No DDP module outlives this function, since the caller destroys its process group then.
    """
    factory = find_factory(args.factory)
    entrants = [(name, cap_mb) for cap_mb in args.caps for name in names]
    trainees: list[_Trainee] = []
    failures = []
    for name, cap_mb in screen.track(entrants, "compiling"):
        trainee, error = _admit(name, cap_mb, args.inner, _refuse_compiled(factory()))
        if trainee is None:
            failures.append({"peer": name, "cap_mb": cap_mb, "error": error})
        else:
            trainees.append(trainee)
    for trainee in screen.track(trainees * args.rounds, "measuring"):
        trainee.take_turn(args.steps)
    trainee_of = {(trainee.name, trainee.cap_mb): trainee for trainee in trainees}
    return [trainee.result(trainee_of) for trainee in trainees], failures


def _refuse_compiled(loaded: Loaded) -> Loaded:
    """What was given; raises InputError if the model, or a part of it, is compiled."""
    if _torch.compiled_parts(loaded.model):
        raise InputError(
            f"this {type(loaded.model).__name__} is compiled already, at least in part, so that no "
            "training of it would be eager; have the factory return it uncompiled"
        )
    return loaded


class _Trainee:
    """A model that is trained in one peer's way, with one cap for DDP's buckets."""

    def __init__(self, name: str, cap_mb: float | None, inner: str, loaded: Loaded) -> None:
        self.name = name  # of its peer, in `PEERS`
        self.cap_mb = cap_mb  # None for DDP's default
        self.turns_s: list[float] = []  # what a step took in each turn
        self._inputs = loaded.inputs
        with self._settings():  # Dynamo's, of this peer; also around each step
            self._ddp = DistributedDataParallel(loaded.model, bucket_cap_mb=cap_mb)
            self._call = _compile(PEERS[name], self._ddp, inner)
        trained = [parameter for parameter in self._ddp.parameters() if parameter.requires_grad]
        # A step costs the same at any rate, and at 0 a sum as loss does not diverge.
        self._optimizer = torch.optim.SGD(trained, lr=0.0)
        self._device = trained[0].device
        self._clock = Clock(self._device)

    def warm_up(self) -> None:
        """Train until nothing more is compiled and no bucket changes any more."""
        for _ in range(_MOST_STEPS):
            self._step_s()
            if not tuner.is_searching(self._ddp):
                break
        for _ in range(_WARM_STEPS):
            self._step_s()

    @property
    def is_reducing(self) -> bool:
        """Whether a backward has begun to reduce gradients, and did not end."""
        return _torch.has_unfinished_reduction(self._ddp)

    def take_turn(self, num_steps: int) -> None:
        """Note the median of some steps, each as on the slowest rank."""
        self._step_s()  # not counted: caches are still those of the trainee before
        times_s = [self._step_s() for _ in range(num_steps)]
        slowest = torch.tensor(times_s, dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.turns_s.append(statistics.median(slowest.tolist()))

    def result(self, trainee_of: Mapping[tuple[str, float | None], _Trainee]) -> dict[str, Any]:
        """Medians over the turns; a throughput above 1 means faster than that baseline.

        `trainee_of` has all trainees by the names of peers and the caps.
        """
        result: dict[str, Any] = {"peer": self.name, "cap_mb": self.cap_mb}
        result["step_s"] = statistics.median(self.turns_s)
        result["fastest_s"], result["slowest_s"] = min(self.turns_s), max(self.turns_s)
        for name in _BASELINES:
            baseline = trainee_of.get((name, self.cap_mb))
            ratio = None
            if baseline is not None:
                # Turn by turn, since what slows one turn down slows its neighbours down too.
                pairs = zip(baseline.turns_s, self.turns_s, strict=True)
                ratio = statistics.median(baseline_s / turn_s for baseline_s, turn_s in pairs)
            result[f"throughput_of_{name}"] = ratio
        search = tuner.find_tuner(self._ddp)
        result["tuning"] = search.outcome if search else ""
        return result

    def _step_s(self) -> float:
        """Train for one step, which all ranks begin together; return the seconds it took here."""
        with self._settings():
            dist.barrier()
            start_s = self._clock.finish()
            torch.autograd.backward(find_loss(call_model(self._call, self._inputs)))
            self._optimizer.step()
            self._optimizer.zero_grad()
            return self._clock.finish() - start_s

    def _settings(self) -> Any:
        return _torch.dynamo_settings(
            optimize_ddp=PEERS[self.name].optimize_ddp, recompile_limit=_RECOMPILE_LIMIT
        )


def _compile(peer: Peer, ddp: DistributedDataParallel, inner: str) -> Callable[..., Any]:
    """What to call to run the model's forward in the way of `peer`."""
    if not peer.is_compiled:
        return ddp
    if peer.options is not None:  # else `inner` compiles alone
        options: dict[str, Any] = {"inner": inner, **peer.options}
        compiled: Callable[..., Any] = torch.compile(ddp, backend="ddpopt", options=options)
        return compiled
    # An object of this model's own: otherwise Dynamo would give it code that an equal backend
    # compiled for another model, whose graph was split differently.
    return torch.compile(ddp, backend=functools.partial(_torch.lookup_backend(inner)))


def _admit(
    name: str, cap_mb: float | None, inner: str, loaded: Loaded
) -> tuple[_Trainee | None, str]:
    """A model that was compiled and trained; or None and the first error, if a rank had one.

    A collective, so that all ranks measure the same ones.

    Raises:
        PeerError: ranks have failed at different places, so that some may wait for the gradients
            of others: at least one did not get here, or was in the middle of a reduction.
    """
    group = dist.group.WORLD
    assert group is not None, "the command has joined one"
    meeting = JointDecision(group, f"bench: {name}", next_key(group, "bench"), _LONGEST_WAIT_S)
    dist.barrier()  # all have announced themselves, or `decide` would not wait for them
    trainee, error, problem = None, "", ""
    try:
        trainee = _Trainee(name, cap_mb, inner, loaded)
        trainee.warm_up()
    except Exception as raised:  # a way that cannot train this model does not stop the others
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:_ERROR_LENGTH]}"
        if trainee is not None and trainee.is_reducing:
            # Another rank may have launched more allreduces than this one, or fewer.
            problem = f"{error}, while gradients were reduced"
    if refusal := meeting.decide(problem):
        # The process has to end: that frees the others from the collective in which they wait.
        here = f"it raised {error}" if error else "it trains"
        raise PeerError(
            f"bench: ranks cannot go on together after training {name} (here {here}): "
            f"{refusal.reason}; look at the log of each rank, and mend what one lacks, or leave "
            "this way out of --peers"
        )
    errors = [error] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    error = next(filter(None, errors), "")
    return (None if error else trainee), error


def _parts(data: Mapping[str, Any]) -> list[str | Table]:
    """The table and its notes, for people."""
    rows = []
    for result in data["results"]:
        row = [_cap(result), result["peer"]]
        row += [format_ms(result[key]) for key in ("step_s", "fastest_s", "slowest_s")]
        for name in _BASELINES:
            ratio = result[f"throughput_of_{name}"]
            # Of throughputs; the table has that of times.
            row.append("-" if ratio is None else f"{1 / ratio:.2f}")
        rows.append((*row, PEERS[result["peer"]].description))
    times_of = [f"/ {name}'s" for name in _BASELINES]
    header = ("cap MiB", "peer", "step ms", "from", "to", *times_of, "")
    parts: list[str | Table] = [
        f"{count(data['world_size'], 'rank')} ({data['backend']}), inner compiler {data['inner']}, "
        f"{count(data['rounds'], 'round')} of {count(data['steps'], 'step')}\n"
        "a step's time: the median round's, the fastest's and the slowest's (differences within "
        "these are noise), and as a multiple of a peer's in the same round, the median of all "
        "rounds, below 1 if faster\n",
        Table(header=header, rows=rows),
    ]
    notes = [f"{r['peer']} ({_cap(r)}): {r['tuning']}" for r in data["results"] if r["tuning"]]
    notes += [f"{f['peer']} ({_cap(f)}) failed: {f['error']}" for f in data["failures"]]
    return [*parts, "\n" + "\n".join(notes)] if notes else parts


def _cap(result: Mapping[str, Any]) -> str:
    return "default" if result["cap_mb"] is None else f"{result['cap_mb']:g}"
