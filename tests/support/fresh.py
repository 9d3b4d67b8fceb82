"""Processes that have imported torch, and nothing else: as a user's is when it imports ddpopt.

Importing torch takes two seconds of a processor. One process does, and others are forked from it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_SERVER = """
import json, os, sys, torch
for line in sys.stdin:
    code, folder = json.loads(line)
    child = os.fork()
    if not child:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        exec(compile(code, "code of a test", "exec"), {"__name__": "__main__"})
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def run_fresh(code: str) -> str:
    """Run code in a new process; return what it prints, or raise with its errors.

    `OMP_NUM_THREADS` and torch's own variables are those of the first call's environment.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        server.stdin.write(json.dumps([code, folder]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    assert status == "0", f"status {status}: {err}"
    return out


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that has imported torch; it ends with this one, which closes its input."""
    command = [sys.executable, "-c", _SERVER]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
