"""Tests run on tiny models: one thread a process is fastest, and leaves the other cores to other processes."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
