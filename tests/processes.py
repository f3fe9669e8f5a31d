"""Commands as a user types them, each a process of its own with its own exit code.

`run` starts an interpreter. `fork` takes a copy of one that has done the imports and nothing else, which spares the two
seconds that these take: for tests that start many. `refusals` gives hundreds of wrong command lines to one such copy.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
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
        for name in ("stdout", "stderr"):
            Path(self.folder.name, name).touch()  # it may end before it says anything
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


LIMIT = 20  # seconds that a command line may take to be refused, also on a busy machine


def refusals(module: str, lines: Sequence[Sequence[str]], folder: Path) -> list[dict]:
    """How each of many command lines of `python -m module` ended, one after another in one process in a folder."""
    (folder / "configs").symlink_to(ROOT / "configs")
    with tempfile.TemporaryDirectory() as results:
        answer = Path(results, "answer.json")
        process = READY.Process(target=_refuse, args=(module, lines, folder, answer), daemon=True)
        process.start()
        process.join(LIMIT + len(lines))
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{len(lines)} lines of {module} are still running")
        return json.loads(answer.read_text())


def _refuse(module: str, lines: Sequence[Sequence[str]], folder: Path, answer: Path) -> None:
    os.environ.update(PLAIN)
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    sys.dont_write_bytecode = True  # else a config file leaves some beside it
    command = importlib.import_module(module if "." in module else f"{module}.__main__")
    from absl import flags

    from train import cli

    def told(words: Sequence[str]) -> dict:
        sys.argv = [module, *words]
        flags.FLAGS.unparse_flags()
        for name in flags.FLAGS:
            flags.FLAGS[name].unparse()
        out, err, start, before = io.StringIO(), io.StringIO(), time.monotonic(), sorted(folder.rglob("*"))
        signal.alarm(LIMIT)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.run(command.main)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = "traceback"
            err.write(traceback.format_exc())
        signal.alarm(0)
        wrote = [str(path) for path in sorted(folder.rglob("*")) if path not in before]
        seconds = time.monotonic() - start
        return dict(code=code, stdout=out.getvalue(), stderr=err.getvalue(), wrote=wrote, seconds=seconds)

    signal.signal(signal.SIGALRM, _too_long)
    answer.write_text(json.dumps([told(words) for words in lines]))


class TooLong(BaseException):
    pass


def _too_long(number, frame) -> None:
    raise TooLong(f"not refused within {LIMIT} s")


def call(*words: str) -> tuple[int, str, str]:
    process = fork(*words)
    return process.wait(300), process.stdout, process.stderr


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
