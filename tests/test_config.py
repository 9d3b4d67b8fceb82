"""Flags: assignment, patch and environment, and the values that are refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ddpopt
from ddpopt import config


def test_patch_sets_and_restores() -> None:
    """It is a context manager and a decorator, and restores also when the body raises."""

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


def test_verify_and_disagreement_have_variables() -> None:
    """DDPOPT_VERIFY and DDPOPT_DISAGREEMENT are read at import."""
    assert _print_flag("verify", DDPOPT_VERIFY="1").stdout.strip() == "True"
    assert _print_flag("disagreement", DDPOPT_DISAGREEMENT="error").stdout.strip() == "error"


def test_what_the_environment_says_wrongly_is_named_by_its_variable() -> None:
    """A wrong value is an error; an unknown variable is a warning, with the nearest known one."""
    wrong = _print_flag("buckets", DDPOPT_BUCKETS="best")
    assert "the environment variable DDPOPT_BUCKETS is 'best'; valid values are" in wrong.stderr
    unknown = _print_flag("buckets", DDPOPT_BUCKET="auto")
    assert unknown.stdout.strip() == "ddp"
    assert "variable DDPOPT_BUCKET is not read; ddpopt reads DDPOPT_BUCKETS\n" in unknown.stderr
    option = _print_flag("buckets", DDPOPT_SPLIT="backward")
    assert "split is an option, not a variable: options={'split': ...}\n" in option.stderr


@pytest.mark.parametrize(("text", "printed"), [("0", "False"), ("1", "True")])
def test_the_environment_sets_the_default(text: str, printed: str) -> None:
    """DDPOPT_ENABLED is read at import."""
    assert _enabled_with(text).stdout.strip() == printed


def test_a_bad_environment_value_is_an_error_that_names_it() -> None:
    """It says which variable, which value, and what is valid."""
    stderr = _enabled_with("maybe").stderr
    assert "DDPOPT_ENABLED is 'maybe'; valid values are ['0', '1']" in stderr


def test_the_environment_names_the_folder_of_dumps() -> None:
    """DDPOPT_DUMP_DIR is read at import."""
    done = _print_flag("dump_dir", DDPOPT_DUMP_DIR="/some/where")
    assert done.stdout.strip() == "/some/where"


def _enabled_with(text: str) -> subprocess.CompletedProcess[str]:
    return _print_flag("enabled", DDPOPT_ENABLED=text)


def _print_flag(flag: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import ddpopt; print(ddpopt.config.{flag})"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
