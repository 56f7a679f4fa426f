"""``python -m fxquant``: the shell verbs."""

import sys

from fxquant.cli import main

sys.exit(main())
