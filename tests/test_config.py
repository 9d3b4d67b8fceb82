"""Flags: assignment, patch and environment, and the values that are refused."""

from __future__ import annotations

import os
import runpy
from typing import Any
from unittest import mock

import pytest

import ddpopt
from ddpopt import config


def test_patch_sets_and_restores() -> None:
    """`patch` is a context manager and a decorator, and restores also when the body raises."""

    @config.patch(enabled=False)
    def decorated() -> bool:
        return config.enabled

    assert config.enabled is True
    assert decorated() is False
    assert config.enabled is True
    with config.patch(enabled=False):
        assert config.enabled is False
    assert config.enabled is True
    with pytest.raises(KeyError), config.patch(enabled=False):
        raise KeyError
    assert config.enabled is True


@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_wrong_type_is_refused_and_nothing_is_set(value: object) -> None:
    """The message names the value."""
    with pytest.raises(ddpopt.errors.OptionError, match=repr(value)):
        config.enabled = value
    with pytest.raises(ddpopt.errors.OptionError, match=repr(value)), config.patch(enabled=value):
        pass
    assert config.enabled is True


@pytest.mark.parametrize("value", [None, 1, True])
def test_dump_dir_is_a_str(value: object) -> None:
    """Other types are refused with the value; a folder need not exist yet."""
    with pytest.raises(ddpopt.errors.OptionError, match=f"'dump_dir' is {value!r}"):
        config.dump_dir = value
    with config.patch(dump_dir="/nowhere"):
        assert config.dump_dir == "/nowhere"
    assert config.dump_dir == ""


def test_an_unknown_flag_is_refused_with_the_known_ones() -> None:
    """A typo does not pass for a setting."""
    with pytest.raises(
        ddpopt.errors.OptionError, match=r"'enable'.*\['buckets', .*'enabled', 'verify'\]"
    ):
        config.enable = False


@pytest.mark.parametrize(("flag", "value"), [("verify", 1), ("disagreement", "ignore")])
def test_verify_and_disagreement_are_checked(flag: str, value: object) -> None:
    """The message names the flag and the value; nothing is set."""
    before = getattr(config, flag)
    with pytest.raises(ddpopt.errors.OptionError, match=f"'{flag}' is {value!r}"):
        setattr(config, flag, value)
    assert getattr(config, flag) == before


def _imported(**environment: str) -> dict[str, Any]:
    """Run the module as an import does, with these variables; return its names."""
    with mock.patch.dict(os.environ, environment):
        return runpy.run_path(str(config.__file__))


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("enabled", "0", False),
        ("enabled", "1", True),
        ("verify", "1", True),
        ("disagreement", "error", "error"),
        ("dump_dir", "/some/where", "/some/where"),
    ],
)
def test_the_environment_sets_the_default(flag: str, text: str, value: object) -> None:
    """Variables are read at import."""
    assert _imported(**{f"DDPOPT_{flag.upper()}": text})[flag] == value


@pytest.mark.parametrize(("flag", "text"), [("enabled", "maybe"), ("buckets", "best")])
def test_a_bad_value_of_the_environment_is_named_by_its_variable(flag: str, text: str) -> None:
    variable = f"DDPOPT_{flag.upper()}"
    with pytest.raises(ddpopt.errors.OptionError, match=f"variable {variable} is '{text}'"):
        _imported(**{variable: text})


@pytest.mark.parametrize(
    ("variable", "remedy"),
    [("DDPOPT_BUCKET", "ddpopt reads DDPOPT_BUCKETS$"), ("DDPOPT_SPLIT", "split is an option")],
)
def test_a_variable_that_is_not_read_is_warned_of(variable: str, remedy: str) -> None:
    """The warning has the nearest known one, or says that it is an option."""
    with pytest.warns(UserWarning, match=f"{variable} is not read; {remedy}"):
        assert _imported(**{variable: "auto"})["buckets"] == "ddp"
