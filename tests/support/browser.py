"""A real browser, if one is installed, which opens a page and runs its script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
_FLAGS += ["--hide-scrollbars", "--virtual-time-budget=20000"]

needs_browser = pytest.mark.skipif(_CHROMIUM is None, reason=f"none of {', '.join(_NAMES)} is here")


def browse(address: str, folder: Path, *flags: str) -> str:
    """Open an address and return what the browser prints; what it keeps is in the folder."""
    assert _CHROMIUM is not None
    command = [_CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
