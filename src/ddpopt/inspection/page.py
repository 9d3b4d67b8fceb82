"""The page of an explanation: one HTML text that needs nothing else, not even a network.

This module only puts style, script and data into page.html. The script makes the page of the data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

# In JSON these characters stand in strings only, where an escape means the same. Without them a
# name can neither end the element that holds the data nor open a comment in it.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def render_page(content: Mapping[str, Any]) -> str:
    """Return what `Explanation.to_dict` returns as one self-contained HTML page.

    Names and sentences in it may be any text: the script makes text of them, and never markup.

    Raises:
        ValueError: a time in it is not finite, which JSON cannot express.
    """
    files = resources.files("ddpopt.inspection")
    page, style, script = (
        files.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")
    )
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(dict(content), allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    page = page.replace("{{policy}}", policy).replace("{{style}}", style)
    # The data last: names may look like a placeholder.
    return page.replace("{{script}}", script).replace("{{explanation}}", data)


def _digest(text: str) -> str:
    """Return how the Content-Security-Policy names a script or a style that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
