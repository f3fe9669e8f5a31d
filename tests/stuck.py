"""`python -m train` whose step hangs: `python -m tests.stuck STEP train --config=... --workdir=...`.

At most once in a folder's life, as whatever made it hang would be gone after a restart.
"""

import dataclasses
import runpy
import sys
import time
from pathlib import Path

from train import loop


def hang(workdir: str, at: int) -> None:
    """Lets the run's step with this number never end."""
    prepare, mark = loop.prepare, Path(f"{workdir}.stuck")

    def prepared(config):
        run = prepare(config)

        def steps(state, batches, n):
            if not mark.exists() and int(state.step) + n >= at:
                mark.touch()
                time.sleep(1000)
            return run.train_steps(state, batches, n)

        return dataclasses.replace(run, train_steps=steps)

    loop.prepare = prepared


if __name__ == "__main__":
    _, at, *sys.argv = sys.argv
    (workdir,) = [word.partition("=")[2] for word in sys.argv if word.startswith("--workdir=")]
    hang(workdir, int(at))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
