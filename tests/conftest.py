"""Shared by all tests."""

import os

# The tests run side by side: one thread each, set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
