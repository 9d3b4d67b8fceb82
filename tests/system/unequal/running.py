"""Run a script on a rank: all of it with eager DDP, then all of it compiled; and compare.

A rank does one action after another and waits for nobody but in collectives, as in a real run. So
an order that differs between ranks shows as an error, a hang or wrong sums. Were all ranks kept at
the same action from outside, some orders that differ would never meet.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import logging
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ddpopt
from ddpopt.split.cut import Cut
from tests.system.campaigns.planted import planting
from tests.system.training.comparing import differences, lines_of, within
from tests.system.training.running import anywhere, quietly
from tests.system.unequal.performing import perform
from tests.system.unequal.script import Script
from tests.system.unequal.twin import EAGER, Twin, choosing

_MEASURE = within(1e-7)  # in float64, after some forty steps; a fault makes 1e-4 and more
_MOST_DIFFERENCES = 6  # that are told
_MOST_TEXT = 3000  # characters of a traceback

# By the twin's kind and the limit; see `run_script`.
_groups: dict[tuple[str, float], dist.ProcessGroup] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank says of a script.

    Errors are tracebacks, "" for none. `difference` is the first action whose numbers differ, and
    how. `sections` are those of each graph that was compiled, and `changed_buckets` says that DDP's
    became others.
    """

    eager_error: str
    error: str
    difference: str = ""
    sections: tuple[int, ...] = ()
    changed_buckets: bool = False


def run_script(
    rank: int, script: Script, kinds: Sequence[str], limit_s: float, plant: str, folder: str
) -> Report:
    """Run a script as twins of these kinds, the last of which is judged, on each rank.

    A rank whose peer raised gives up its collective after `limit_s`. After an error the process is
    good for nothing more: its groups are in any state. How far a rank is, `progress_of` says, also
    if its process ends.
    """
    faulthandler.dump_traceback_later(18 * limit_s)  # where it hangs, if not in a collective
    with contextlib.ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        stack.enter_context(quietly(logging.ERROR))
        # With it the unsplit compile refuses `retain_graph`, and a cut forward's sections do.
        stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        eager, eager_error = None, ""
        if EAGER in kinds:
            with planting(plant, rank, is_eager=True):
                eager, eager_error = _train(rank, script, EAGER, limit_s, folder)
        stack.enter_context(choosing(script))
        stack.enter_context(planting(plant, rank))
        ours, error = _train(rank, script, kinds[-1], limit_s, folder)
        cuts: list[Cut] = []
        changed_buckets = False
        if not error:
            explanations = [ddpopt.explain(ddp) for ddp in ours.ddps]
            cuts = [cut for explanation in explanations for cut in explanation.cuts]
            changed_buckets = any(explanation.bucket_plan for explanation in explanations)
        return Report(
            eager_error=eager_error,
            error=error,
            difference=_difference(script, eager, ours) if eager else "",
            sections=tuple(max(1, len(cut.sections)) for cut in cuts),
            changed_buckets=changed_buckets,
        )


def _train(rank: int, script: Script, kind: str, limit_s: float, folder: str) -> tuple[Twin, str]:
    """Do all actions of a script, or those up to the first error, which is returned too."""
    group = _group_of(kind, limit_s)
    recompile_limit = torch._dynamo.config.recompile_limit
    twin, error = Twin(script, kind, rank, group, folder), ""
    try:
        for action in script.actions:
            twin.notes.append({})
            with open(_progress_file(folder, rank), "w") as file:
                file.write(f"{kind}, action {len(twin.notes) - 1}")
            perform(action, twin)
            twin.note_state()
    except Exception:
        # Of whatever kind: a model's, DDP's, Dynamo's or ours. It is what the script shows.
        text = traceback.format_exc()[-_MOST_TEXT:]
        error = f"in action {len(twin.notes) - 1}:\n{text}"
    torch._dynamo.config.recompile_limit = recompile_limit
    anywhere(bool(error))  # the ranks begin the second program together
    return twin, error


def progress_of(folder: str, rank: int) -> str:
    """Which twin a rank trains, or was training when it ended, and which action it does."""
    try:
        with open(_progress_file(folder, rank)) as file:
            return file.read()
    except FileNotFoundError:
        return "before the first action"


def _progress_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"progress-of-rank-{rank}")


def _group_of(kind: str, limit_s: float) -> dist.ProcessGroup:
    """The group for twins of a kind. Collective, the first time."""
    if (kind, limit_s) not in _groups:
        timeout = datetime.timedelta(seconds=limit_s)
        _groups[kind, limit_s] = dist.new_group(timeout=timeout)
    return _groups[kind, limit_s]


def _difference(script: Script, eager: Twin, ours: Twin) -> str:
    """The first action after which something differs, and what; "" if nothing does."""
    pairs = list(zip(eager.notes, ours.notes, strict=False))
    have_ended = len(eager.notes) == len(ours.notes) == len(script.actions)
    for number, (expected, actual) in enumerate(pairs):
        errors = differences(actual, expected, _MEASURE)
        if number == len(pairs) - 1 and not have_ended:  # one of the two may have raised there
            errors = {name: errors[name] for name in errors if name in expected and name in actual}
        found = lines_of(errors).splitlines()
        if found:
            num_more = len(found) - _MOST_DIFFERENCES
            if num_more > 0:
                found = [*found[:_MOST_DIFFERENCES], f"and {num_more} more"]
            return f"in action {number}, {script.actions[number]}:\n" + "\n".join(found)
    return ""
