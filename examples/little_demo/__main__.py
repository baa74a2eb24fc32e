"""Started once by `run.sh`, it starts the ranks; started by torchrun, it is one of them."""

import os
import sys

from examples.little_demo.launch import parse_args, quiet_libraries, start_ranks

if __name__ == "__main__":
    args = parse_args()  # before the slow imports, so that --help is quick
    if "RANK" not in os.environ:
        sys.exit(start_ranks(args, sys.argv[1:]))
    quiet_libraries()
    from examples.little_demo.main import main

    status = main(args)
    # All is said and the groups are closed. gloo's threads can still abort the process while the interpreter takes
    # itself apart, which would turn a success into exit status 134: leave without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
