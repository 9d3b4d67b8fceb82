"""The page of an explanation: one HTML text that needs nothing else, not even a network.

This module only puts the data into the template. The script in page.html makes the page of them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

_POLICY = "{{policy}}"
_EXPLANATION = "{{explanation}}"

# In JSON these characters stand in strings only, where an escape means the same. Without them a
# name can neither end the element that holds the data nor open a comment in it.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def render_page(content: Mapping[str, Any]) -> str:
    """Return an explanation as one self-contained HTML page.

    `content` is what `Explanation.to_dict` returns. Names and sentences in it may be any text:
    they reach the page as data, of which its script makes text and never markup.

    Raises:
        ValueError: a time in it is not finite, which JSON cannot express.
    """
    template = resources.files("ddpopt.inspection").joinpath("page.html").read_text("utf-8")
    page = template.replace(_POLICY, _policy(template))
    return page.replace(_EXPLANATION, _embed(content))  # last: names may look like a placeholder


def _embed(content: Mapping[str, Any]) -> str:
    """Return JSON that may stand in a script element; non-ASCII characters are escaped too."""
    text = json.dumps(dict(content), allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def _policy(template: str) -> str:
    """Return the Content-Security-Policy: the template's own script and style, and no more."""
    return (
        f"default-src 'none'; script-src '{_digest(template, 'script')}'; "
        f"style-src '{_digest(template, 'style')}'; base-uri 'none'; form-action 'none'"
    )


def _digest(template: str, tag: str) -> str:
    match = re.search(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    assert match is not None, f"the template has no {tag}"
    digest = hashlib.sha256(match[1].encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
