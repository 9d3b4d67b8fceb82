"""`ddpopt help TOPIC`: what messages refer to, for who has the package and not its documents."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable

from ddpopt import config
from ddpopt._text import quote
from ddpopt._torch import names
from ddpopt.cli.output import InputError, Report, Screen
from ddpopt.errors import Reason

_OPTIONS = """\
Compare how long the allreduces of an iteration take with its computation on one rank. `torchrun
--nproc-per-node 2 -m ddpopt calibrate` measures what an allreduce takes to start, and for each MiB.

  computation is                      give torch.compile
  4 times as long, or longer          backend="ddpopt": there is little to win
  1 to 4 times as long                options={"buckets": "auto"}
  shorter                             the same, or send less: ddpopt.algorithms, a comm hook

  options={"split": ...}     "auto" (cut backward, else forward), "backward", "forward"
  options={"buckets": ...}   "ddp" (DDP's own), "auto" (searched for), "plan.json" (of a file)
  options={"inner": ...}     the backend that compiles each section, "inductor" by default
  options={"enabled": ...}   False compiles each graph whole
  other keys                 are Inductor's

`torchrun --nproc-per-node 2 -m ddpopt bench MODULE:FACTORY` measures your model with each of them,
with eager DDP and with PyTorch's own DDPOptimizer, in turns."""

_WAITING = """\
Waiting for communication is what overlap does not hide: the time in which backward has nothing left
to compute, and allreduces still run. It is this rank's.

  recording, explain after it     the median of the recorded steps that ran what the last one ran,
                                  from the last gradient to the end of the last allreduce
  the log, explain without one    the median of steps 5 to 10 by DDP's timers, until DDP has taken
                                  the gradients out of its buckets
  metrics                         by the same timers, in one step: ddpopt.sampled_step
  predictions                     as a recording

Efficiency is the iteration of one rank alone, divided by the iteration of that rank among others.
The least iteration, whatever the buckets, is the longer of its computation and one allreduce of all
gradients."""

_FACTORY = """\
`explain` and `bench` take MODULE:FACTORY: a function without arguments in your own code that
returns the model, not in DDP and not compiled, and the inputs of one step.

    def make():
        return Net(), torch.randn(32, 128)

Inputs are a tensor, a tuple of positional arguments or a dict of keyword arguments; the batch of
warmup, verify and plan is the same. The loss is the output's `loss`, or else the sum of the output.

Write package.module:make for what Python can import from the current folder, or
path/to/file.py:make."""


def _describe_variables() -> str:
    # A flag without a text is an error here: each has to have one.
    texts = {
        "DDPOPT_ENABLED": "0 compiles each graph whole",
        "DDPOPT_BUCKETS": "ddp, auto, or the path of a plan that ends in .json",
        "DDPOPT_DUMP_DIR": "a folder for the graphs and the cut of each compile",
        "DDPOPT_VERIFY": "1 compares the first step with an eager one",
        "DDPOPT_DISAGREEMENT": "warning, or error where warmup finds ranks that differ",
    }
    lines = [f"  {name:20}  {texts[name]}" for name in config.VARIABLES]
    return "\n".join(
        [
            "Environment variables, read when ddpopt is imported:",
            "",
            *lines,
            "",
            "split and inner are options, and no variables: options={'split': ...}.",
            "TORCH_LOGS=ddp shows each graph's cut, TORCH_LOGS=+ddpopt those of all ranks.",
        ]
    )


def _describe_reasons() -> str:
    """Each reason for which a graph is compiled whole, or cut in forward."""
    lines: list[str] = []
    for is_of_backward, title in (
        (False, "A graph is compiled whole, as without ddpopt, because"),
        (True, "A graph is cut in forward, not in backward, because"),
    ):
        lines += [title, ""]
        for reason in Reason:
            if reason.is_of_backward == is_of_backward:
                text = f"{reason.name}: {reason.value}"
                lines.append(textwrap.fill(text, 98, initial_indent="  ", subsequent_indent="    "))
        lines.append("")
    return "\n".join(lines).rstrip()


def _describe_torch() -> str:
    return (
        f"ddpopt was tried with torch {names.tested_range()}, on Python 3.10 or newer.\n"
        "It uses some private names of torch; `ddpopt doctor` says if this release has moved one,\n"
        "and what is lost. `pip install` beside an older torch would replace that: with --no-deps\n"
        "it does not, and ddpopt needs nothing else."
    )


TOPICS: dict[str, tuple[str, Callable[[], str]]] = {
    "options": ("which options to train with", lambda: _OPTIONS),
    "waiting": ("what figures mean: waiting, efficiency, the least iteration", lambda: _WAITING),
    "factory": ("how a model and a batch are given", lambda: _FACTORY),
    "reasons": ("why a graph is not split, and what to do", _describe_reasons),
    "variables": ("the environment variables", _describe_variables),
    "torch": ("which torch it needs", _describe_torch),
}


def run(args: argparse.Namespace, _screen: Screen) -> Report:
    """Print a topic, or which there are."""
    if args.topic is None:
        lines = [f"  {name:10}  {title}" for name, (title, _) in TOPICS.items()]
        text = "\n".join(["ddpopt help TOPIC, with one of", "", *lines])
    elif args.topic in TOPICS:
        text = TOPICS[args.topic][1]()
    else:
        raise InputError(
            f"there is no topic {quote(args.topic)}; there are {', '.join(TOPICS)}, and each "
            "command has --help"
        )
    return Report(data={"topic": args.topic, "text": text}, parts=[text])
