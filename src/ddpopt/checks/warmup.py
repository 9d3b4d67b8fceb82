"""`warmup`: compile a DDP model's forward and backward before the first step, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpopt import _logs, _torch, config
from ddpopt._text import installed_version
from ddpopt.checks.copies import (
    ModelCopy,
    Rehearsal,
    dtype_name,
    is_compiled_by_us,
    raising_broken_off,
)
from ddpopt.errors import DisagreementError, OptionError, TorchDriftError
from ddpopt.planning import tuner
from ddpopt.planning.batch import LossFn
from ddpopt.ranks.agree import Fact, Shared, find_difference, gather_distinct
from ddpopt.ranks.store import name_ranks
from ddpopt.split import state
from ddpopt.split.cut import Cut

SILENCE_S = 60.0


def warmup(
    ddp_model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    silence_s: float = SILENCE_S,
) -> None:
    """Compile a DDP model's forward and backward, and wait until all ranks have done so.

    It runs a step on a copy, without communication: parameters, gradients, buffers, random number
    state and DDP's Reducer are left unchanged. Training then runs the code that was compiled here.
    Every rank has to make this call; ranks wait for each other for as long as any of them compiles,
    regardless of the process group's timeout. It needs memory for a second set of parameters,
    gradients and buckets.

    Args:
        ddp_model: A DistributedDataParallel module whose forward runs something compiled with
            `backend="ddpopt"`, by `torch.compile` or in place by `compile()`: the DDP module, its
            module, parts of that, functions. Or what `torch.compile` returned for a DDP module.
        batch: A tensor, a tuple of positional arguments, or a mapping of keyword arguments, with
            the shapes used in training; warm up with each shape that is to be compiled.
        loss_fn: Computes a scalar from the model's output. Default: the output's `loss` (an
            attribute or a key), or else a scalar that depends on all its floating point tensors.
        silence_s: Seconds without a sign of life after which a rank counts as lost.

    Raises:
        PeerError: another rank raised, exited, hangs, or did not make this call.
        DisagreementError: ranks have different models, or some compile nothing, with
            `config.disagreement = "error"`; otherwise all ranks warn.
        OptionError: nothing is compiled with `backend="ddpopt"` on any rank, model or batch cannot
            be copied, all parameters are frozen, or the loss is not a scalar.
        TypeError: there is no DistributedDataParallel in `ddp_model`.
    """
    compile_ahead(Rehearsal(ddp_model, batch, loss_fn, "warmup", silence_s))


def compile_ahead(run: Rehearsal, *, has_own_code: bool = False) -> ModelCopy:
    """As `warmup`, but return the copy; if it `has_own_code`, training does not run that code."""
    copied, _ = run.rehearse(has_own_code=has_own_code)
    state_of_copy = state.get(copied.ddp)
    with run.stage("comparing"):
        if not has_own_code:
            # Training will run the copy's code, and go on with the search for better buckets that
            # the copy's first forward began. `code` has Dynamo's entries for it.
            state.get(run.ddp).code += state_of_copy.code
            tuner.continue_search(copied.ddp, run.ddp)
        facts = _facts_of(run.ddp, state_of_copy.cuts)
    # No error yet: in mid-training one rank alone may compile nothing more, past Dynamo's limit of
    # recompiles, which `_compare_models` judges.
    problem = "" if state_of_copy.cuts else _why_nothing_compiled(run.model)
    _compare_models(run.ddp, _Report(facts, problem))
    return copied


class _Report(NamedTuple):
    """What a rank tells the others: facts of what it compiled for, or why it compiled nothing."""

    facts: Sequence[Fact]
    problem: str


def _compare_models(ddp: DistributedDataParallel, report: _Report) -> None:
    """Warn or raise on all ranks if they compile for different DDP modules, or some do not compile.

    Otherwise ranks would average gradients of different parameters, or wait for each other.
    Collective.

    Raises:
        DisagreementError: they do, and `config.disagreement` is "error".
        OptionError: no rank has compiled anything.
        PeerError: a rank did not make this call.
    """
    with raising_broken_off():
        reports = gather_distinct(ddp, report, "comparing what ranks compile for")
    uncompiled = [each for each in reports if each.value.problem]
    if len(uncompiled) == len(reports):
        raise OptionError(report.problem)
    name = f"DistributedDataParallel({type(ddp.module).__name__})"
    texts = []
    if uncompiled:
        texts.append(
            f"{name_ranks(rank for each in uncompiled for rank in each.ranks)} compiled nothing "
            f"of {name}, as others did, and runs it eagerly, which the others wait for: "
            f"{uncompiled[0].value.problem}"
        )
    difference = find_difference(
        [Shared(each.value.facts, each.ranks) for each in reports],
        "gradients are averaged in the order of parameters, whatever their names: build model and "
        "DDP alike on all ranks, with the same releases",
    )
    if difference is not None:
        texts.append(f"ranks compiled for different {name} modules: {difference}")
    if texts and config.disagreement == "error":
        raise DisagreementError("; ".join(texts))
    for text in texts:
        _logs.warning("%s", text)


def _facts_of(ddp: DistributedDataParallel, cuts: Sequence[Cut]) -> list[Fact]:
    """The facts that have to be equal on all ranks, from the most to the least telling.

    What else each rank compiled does not matter: sections, fallbacks and shapes of inputs may
    differ, since the Reducer has the same buckets on all ranks and launches them in the same order.
    But if a graph has collectives of its own, ranks have to issue these and DDP's in one order.
    """
    try:
        reduced, caps = _torch.reducer_parameters(ddp), _torch.reducer_caps(ddp)
    except TorchDriftError as error:
        _logs.info("ranks do not compare what they compile: %s", error)
        return []
    facts = []
    for position, (tensor, parameter) in enumerate(reduced.items()):
        text = f"{parameter.name} {dtype_name(tensor.dtype)}{list(tensor.shape)}"
        facts.append(Fact(f"parameter {position}", text))
    facts += [
        Fact("bucket limits in bytes", str(list(caps))),
        Fact("find_unused_parameters", str(ddp.find_unused_parameters)),
        Fact("static_graph", str(ddp.static_graph)),
        Fact(
            "the order of collectives in graphs that have some of their own",
            str(sorted({_describe_order(cut) for cut in cuts} - {""})),
            "DDP's collectives come between others of the model there, so that ranks wait for each "
            "other: compile with the same options on all ranks, all with options={'enabled': "
            "False} if some must",
        ),
        Fact("torch", torch.__version__),
        Fact("ddpopt", installed_version()),
    ]
    return facts


def _describe_order(cut: Cut) -> str:
    """The order in which a graph communicates and releases gradients; empty without collectives.

    Where the graph is cut makes no difference to this order; whether it is cut at all does.
    """
    if cut.order:  # a digest
        return f"that of {cut.split}, {cut.order}"
    if cut.num_collectives:
        return f"whole, with {cut.num_collectives} calls that may be collectives"
    return ""


def _why_nothing_compiled(model: torch.nn.Module) -> str:
    """What is wrong where a step compiled nothing with our backend."""
    if is_compiled_by_us(model):
        return (
            "torch.compile compiled nothing of this model; "
            "TORCH_LOGS=graph_breaks,recompiles says why Dynamo gave up"
        )
    return (
        "nothing in this model is compiled with backend='ddpopt'; give the result of "
        "torch.compile(DistributedDataParallel(module), backend='ddpopt'), or a "
        "DistributedDataParallel that is compiled itself, ddp.compile(backend='ddpopt'), or in "
        "whose forward something is"
    )
