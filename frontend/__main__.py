"""Entry point of `python -m tandem.frontend`, which runs `tandem frontend`.

Supervisors start their HTTP processes this way.
"""

import sys

from tandem.frontend.cli.main import main

sys.exit(main(["frontend", *sys.argv[1:]]))
