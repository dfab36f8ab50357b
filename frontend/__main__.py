"""Entry point of `python -m tandem.frontend`, which runs `tandem frontend`.

A supervisor starts its HTTP process this way.
"""

import sys

from tandem.frontend.cli.main import main

sys.exit(main(["frontend", *sys.argv[1:]]))
