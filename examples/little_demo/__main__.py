"""Started once by `run.sh`, it starts the ranks; started by torchrun, it is one of them."""

import atexit
import os
import sys

from examples.little_demo.options import parse_args


def leave(status: int) -> None:
    """End the process without taking the interpreter apart.

    All is said and the groups are closed by then, but gloo's threads can still abort the process meanwhile, which would
    turn a success into exit status 134.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or int(hasattr(sys, "last_type")))  # it has if an exception ends the program


if __name__ == "__main__":
    args = parse_args()  # before the slow imports, so that --help is quick
    from examples.little_demo.launch import quiet_libraries, start_ranks

    if "RANK" not in os.environ:
        sys.exit(start_ranks(args, sys.argv[1:]))
    quiet_libraries()
    from examples.little_demo.main import main

    exit_status = main(args)
    atexit.register(leave, exit_status)  # whoever runs this module may have a last word
    sys.exit(exit_status)
