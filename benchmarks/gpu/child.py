"""Run one line in this process: `python -m benchmarks.gpu.child REQUEST`, for `runner.py`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Findings, describe


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`run` is `module:function`, called with findings, the device and the arguments."""

    run: str
    device: str
    arguments: dict[str, Any]
    output: str


def main() -> None:
    """Run it, and leave without waiting for anybody: a broken line's ranks may never answer."""
    request = Request(**json.loads(sys.argv[1]))
    findings = Findings(Path(request.output))
    try:
        module, _, name = request.run.partition(":")
        run = getattr(importlib.import_module(module), name)
        run(findings, request.device, **request.arguments)
        findings.found.is_done = True
    except Exception as error:
        traceback.print_exc()
        findings.found.error = describe(error)
    findings.save()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
