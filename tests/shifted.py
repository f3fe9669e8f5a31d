"""A command under a clock that somebody sets: `python -m tests.shifted SECONDS train --config=... --workdir=...`.

Every tenth of a second the time of day is set forward by so many seconds, or back again. The clocks that only run
(`time.monotonic`) cannot be set.
"""

import runpy
import sys
import time

if __name__ == "__main__":
    _, seconds, *sys.argv = sys.argv
    now, shift = time.time, float(seconds)
    time.time = lambda: now() + shift * (int(10 * time.monotonic()) % 2)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
