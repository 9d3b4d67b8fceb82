"""Find the factory that a command is given: `package.module:factory` or `path/to/file.py:factory`.

It takes no arguments and returns a model and the inputs of one step.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.cli.output import InputError

_FILE_MODULE = "__ddpopt_factory__"  # the name of a module given as a file


class Loaded(NamedTuple):
    """What a factory returned; `inputs` are as for `ddpopt.planning.estimate`."""

    model: nn.Module
    inputs: Any


def find_factory(text: str) -> Callable[[], Loaded]:
    """Import the factory that `text` names; return a function that makes a model and its inputs.

    Raises:
        InputError: there is no such module or function, or importing it raises; the returned
            function raises it if the factory raises or returns something else.
    """
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise InputError(
            f"{text!r} names no factory; write package.module:factory or path/to/file.py:factory"
        )
    with _told(f"importing {place}"):
        found: Any = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise InputError(f"{place} has no {name!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{text} is a {type(found).__name__}; a factory is a function")
    return functools.partial(_make, text, found)


def _import_module(name: str) -> types.ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that it imports is missing
        raise InputError(
            f"there is no module {error.name!r} in the current folder or among the installed "
            "packages; for a file write path/to/file.py:factory"
        ) from error


def _import_file(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(_FILE_MODULE, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"there is no file {path}; the path counts from the current folder")
    sys.path.insert(0, str(path.resolve().parent))  # as Python does for a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[_FILE_MODULE] = module  # Dynamo looks a frame's module up there
    spec.loader.exec_module(module)
    return module


def _make(text: str, factory: Callable[[], Any]) -> Loaded:
    with _told(text):
        made = factory()
    is_pair = isinstance(made, tuple | list) and len(made) == 2
    if not is_pair or not isinstance(made[0], nn.Module):
        kinds = [type(item).__name__ for item in made] if is_pair else type(made).__name__
        raise InputError(
            f"{text} returned {kinds}; it must return two things: a torch.nn.Module, and its "
            "inputs as a tensor, a tuple or a dict"
        )
    if isinstance(made[0], DistributedDataParallel):
        raise InputError(
            f"{text} returned a DistributedDataParallel; return the module that is inside"
        )
    trained = [parameter for parameter in made[0].parameters() if parameter.requires_grad]
    if not trained:
        raise InputError(f"no parameter of the model of {text} requires grad; unfreeze one")
    if any(parameter.is_meta for parameter in trained):
        raise InputError(f"the model of {text} is on the meta device; give it memory to be run")
    return Loaded(*made)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise what the user's code raises in this block as InputError, with the place in one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise InputError(f"{what} raised {type(error).__name__}: {error}{place}") from error
