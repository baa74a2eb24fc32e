"""``torchrun ... -m examples.little_demo``; `run.sh` is the short way."""

import os
import sys

from examples.little_demo.main import main

if __name__ == "__main__":
    status = main()
    # All is said and the groups are closed. gloo's threads can still abort the process while the interpreter takes
    # itself apart, which would turn a success into exit status 134: leave without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
