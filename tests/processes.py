"""Commands as a user types them, each a process of its own with its own exit code.

`run` starts an interpreter. `fork` takes a copy of one that has done the imports and nothing else, which spares the two
seconds that these take: for tests that start many.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.flags import FAST

ROOT = Path(__file__).parent.parent
READY = multiprocessing.get_context("forkserver")
READY.set_forkserver_preload(["train.loop", "eval.suites"])
PLAIN = {"XLA_FLAGS": FAST}  # one device, as on a laptop


def run(*words: str, timeout: int = 120) -> subprocess.CompletedProcess:
    """`python -m words...` to its end."""
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | PLAIN, capture_output=True, text=True, timeout=timeout)


class fork:
    """`python -m words...`, going on while the test does."""

    def __init__(self, *words: str, **environment: str):
        self.folder = tempfile.TemporaryDirectory()
        self.process = READY.Process(target=_become, args=(words, self.folder.name, environment), daemon=True)
        self.process.start()
        self.pid = self.process.pid

    def running(self) -> bool:
        return self.process.is_alive()

    def wait(self, timeout: int = 120) -> int:
        self.process.join(timeout)
        if self.running():
            self.process.kill()
            raise TimeoutError(f"still running after {timeout} s: {self.stderr}")
        return self.process.exitcode

    def send(self, sign: signal.Signals) -> None:
        os.kill(self.pid, sign)

    @property
    def stdout(self) -> str:
        return Path(self.folder.name, "stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(self.folder.name, "stderr").read_text()


def _become(words: tuple[str, ...], folder: str, environment: dict[str, str]) -> None:
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.chdir(ROOT)
    os.environ.update(PLAIN | environment)
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
