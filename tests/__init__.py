"""Tests, by the path of what they test."""

import os

# Libraries' threads find little to do here, and use a core each while they wait for more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
