"""Run `tandem frontend` as `python -m tandem.frontend`, the way a supervisor starts an HTTP process."""

import sys

from tandem.frontend.cli.main import main

sys.exit(main(["frontend", *sys.argv[1:]]))
