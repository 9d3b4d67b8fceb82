"""`python -m ddpopt`: the command line `ddpopt`, which is in cli/."""

import sys

from ddpopt.cli import main

if __name__ == "__main__":
    sys.exit(main())
