"""`python -m frontend` is `tandem frontend`: how a supervisor starts an HTTP process."""

import sys

from tandem.frontend.cli.main import main

sys.exit(main(["frontend", *sys.argv[1:]]))
