"""Started once by `run.sh`, it starts the ranks; started by torchrun, it is one of them."""

import atexit
import os
import sys

from examples.little_demo.options import parse_args

if __name__ == "__main__":
    args = parse_args()  # before the slow imports, so that --help is quick
    from examples.little_demo.launch import leave, quiet_libraries, start_ranks

    if "RANK" not in os.environ:
        sys.exit(start_ranks(args, sys.argv[1:]))
    quiet_libraries()
    from examples.little_demo.main import main

    exit_status = main(args)
    atexit.register(leave, exit_status)  # whoever runs this module may have a last word
    sys.exit(exit_status)
