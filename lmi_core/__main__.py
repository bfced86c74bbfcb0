"""``python -m lmi_core`` is ``lmi``."""

import sys

from lmi_core.cli import main

sys.exit(main())
