"""Blocks of examples that took long to make, kept in a folder, where all runs on a machine find them.

A block is a file, under the fingerprint of its data, so changed code or settings never meet what others made. Processes
need no lock: each writes a file of its own and puts it in place, and two that make one block put the same bytes there.
"""

import functools
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from data.kept import narrowest
from data.task import Example, Task
from data.workers import Block

VARIABLE = "LONGVIEW_EXAMPLES"
TYPES = "types"  # beside the arrays of a file: those they had, in the order of their names


@functools.lru_cache(maxsize=8)
def place(root: str, task: Task, seed: int) -> Path:
    return Path(root, task.name, task.fingerprint(seed))


def shelved(
    blocks: Sequence[Block], make: Callable[[Sequence[Block]], Iterator[tuple[Block, Example]]]
) -> Iterator[tuple[Block, Example]]:
    """Each of these blocks as its task packs it; what is costly and not on the shelf is made and put there."""
    root, missing = os.environ.get(VARIABLE), []
    for block in blocks:
        found = read(file_of(root, block)) if root and block.task.costly else None
        if found is None:
            missing.append(block)
        else:
            yield block, found
    for block, made in make(missing):
        packed = block.task.packed(made)
        if root and block.task.costly:
            write(file_of(root, block), packed)
        yield block, packed


def file_of(root: str, block: Block) -> Path:
    return place(root, block.task, block.seed) / f"{block.split}-{block.order}-{block.index}-{block.place}.npz"


def read(file: Path) -> Example | None:
    """None where there is none, or what is there is damaged: every array has a check sum."""
    try:
        with np.load(file, allow_pickle=False) as found:
            types = found[TYPES]
            names = sorted(name for name in found.files if name != TYPES)
            return {name: found[name].astype(kind) for name, kind in zip(names, types, strict=True)}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def write(file: Path, example: Example) -> None:
    """Says so once where there is no room or no right to, as a run needs no shelf."""
    names = sorted(example)
    narrow = {name: example[name].astype(narrowest(example[name])) for name in names}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as made:
            try:
                np.savez(made, **narrow, **{TYPES: np.array([example[name].dtype.str for name in names])})
                made.close()
                os.replace(made.name, file)
            except BaseException:
                Path(made.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        warnings.warn(f"{VARIABLE}: examples are not kept in {file.parent}: {error.strerror}", stacklevel=2)
