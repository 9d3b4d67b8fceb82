"""Where the command `ddpopt` begins: importing ddpopt takes seconds, and Ctrl-C may be pressed.

It is a module beside the package, since a module within would be imported after the package.
"""

import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command; Ctrl-C at any time exits with status 130, without a traceback."""
    try:
        from ddpopt.cli import main as run  # noqa: PLC0415  # this is what takes seconds

        return run()
    except KeyboardInterrupt:
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
