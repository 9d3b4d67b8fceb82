"""The page of an explanation: one HTML text that needs nothing else, not even a network.

This module only inserts style, script and data into page.html. The script renders the data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

# In JSON these characters occur only in strings, where an escape means the same. Without them no
# name can end the element that holds the data, or open a comment in it.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def render_page(content: Mapping[str, Any]) -> str:
    """Render what `Explanation.to_dict` returns as one self-contained HTML page.

    Names and sentences in it may be any text: the script inserts them as text, never as markup.

    Raises:
        ValueError: a time in it is not finite, which JSON cannot express.
    """
    files = resources.files("ddpopt.inspection")
    names = ("page.html", "page.css", "timeline.js", "page.js")
    page, style, *scripts = (files.joinpath(name).read_text("utf-8") for name in names)
    script = "".join(scripts)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # `_ESCAPES` keeps names from ending the element of the page that holds the data.
    data = json.dumps(dict(content), allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    page = page.replace("{{policy}}", policy).replace("{{style}}", style)
    # Data comes last: names in it may look like a placeholder.
    return page.replace("{{script}}", script).replace("{{explanation}}", data)


def _digest(text: str) -> str:
    """The hash by which the Content-Security-Policy allows a script or a style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
