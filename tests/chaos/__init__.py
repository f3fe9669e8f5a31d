"""Runs beaten with a stick: `python -m tests.chaos`.

Everything here compiles for a CPU, as tests do, into a cache that all processes share.
"""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "longview-test-cache"))
