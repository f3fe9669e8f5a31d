"""The processes of one run, a host or a device each: they join, decide together, and end together.

With one process all of this is nothing. With several, what is read from files is read by the first one for all
(`agree`), what each was given is compared (`same`), and an error of one is the end of all (`joined`).
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax

from model.errors import UserError, told
from train import join
from train.line import LOST, Line, end_process

_line: Line | None = None


class Agreed(UserError):
    """An error that every process of the run gets, at the same point."""


@contextlib.contextmanager
def joined(distributed: bool) -> Iterator[None]:
    """Joins the other processes of the job for the length of the block, if asked to.

    A process that fails in the block ends all of them: exit code 2 and the same line for a mistake of the user's or
    a file system's fault, else `train.line.LOST` in the others. So does one that dies.
    """
    if not distributed:
        yield
        return
    join.initialize()
    the_line()
    try:
        yield
        gather("end", None)
    except BaseException as error:
        if the_line() is None:
            raise
        _end_all(error)
    if _line is not None:
        _line.close()
    jax.distributed.shutdown()


def _end_all(error: BaseException) -> NoReturn:
    line = the_line()
    if not isinstance(error, Agreed):
        time.sleep(1)  # a lost process makes calls fail here too; then it is the watch that has the word
    if found := told(error):
        code, text = found
        line.fail(code, text, everywhere=isinstance(error, Agreed))
        end_process(code, f"error: {text}")
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if isinstance(error, jax.errors.JaxRuntimeError) and (silent := line.silent()):
        line.fail(LOST, f"{text}, with no sign of life from {silent}")
        end_process(LOST, f"error: no sign of life from {silent}: {text}")
    line.fail(1, text)
    traceback.print_exception(error)
    os._exit(1)


# Deciding together


def the_line() -> Line | None:
    """The line to the other processes; None where there are none."""
    global _line
    if _line is None and join.size() > 1:
        _line = join.open_line()
        atexit.register(_line.close)
    return _line


def gather(topic: str, value: Any) -> list[Any]:
    """What each process gave, by rank. Every process must ask; there is no time limit.

    What is asked beside the main thread needs a topic of its own, lest the processes mix up their questions.
    """
    return [value] if the_line() is None else the_line().gather(topic, value)


def agree(compute: Callable[[], Any]) -> Any:
    """Computes on the first process, which sees to the files for all; each gets the value (of JSON) or the error."""
    if the_line() is None:
        try:
            return compute()
        except OSError as error:
            raise UserError(told(error)[1]) from error
    answer = None
    if the_line().rank == 0:
        try:
            answer = {"value": compute()}
        except (UserError, OSError) as error:
            answer = {"error": told(error)[1]}
    answer = gather("decision", answer)[0]
    if "error" in answer:
        raise Agreed(answer["error"])
    return answer["value"]


def same(settings: Callable[[], Mapping[str, Any]]) -> None:
    """Refuses processes that were given different things, and says which differs from the first, and in what."""
    if the_line() is None:
        return
    mine = {key: repr(value) for key, value in settings().items()}
    digests = gather("digest", hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    theirs = gather("settings", mine if the_line().rank in (0, odd) else None)
    first, other = theirs[0], theirs[odd]
    keys = [key for key in first.keys() | other.keys() if first.get(key) != other.get(key)]
    told = "; ".join(f"{key} is {other.get(key, 'not set')}, not {first.get(key, 'not set')}" for key in sorted(keys))
    raise Agreed(f"process {odd} on {the_line().names[odd]} differs from process 0: {told}")


def in_step(function: Callable) -> Callable:
    """A jitted function that no process begins to run for the first time before all have compiled it.

    Collectives find their partners within a time limit, and one process may have the program in its cache while
    another compiles for minutes.
    """
    if the_line() is None:
        return function
    compiled = False

    @functools.wraps(function)
    def run(*args):
        nonlocal compiled
        if not compiled:
            function.lower(*args).compile()
            gather("compiled", None)
            compiled = True
        return function(*args)

    return run
