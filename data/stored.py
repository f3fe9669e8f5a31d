"""Tasks whose examples lie on disk, in a set that `python -m data.prepare` has made."""

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from data.prepared import PreparedSet, open_set
from data.task import Example, Task
from model.settings import Name


@dataclass(frozen=True)
class Stored(Task):
    """Any rows of a split can be had at once, so nothing of them is kept in memory besides.

    The seed changes nothing: examples are what they are. It still shuffles the epochs.
    """

    set_name: ClassVar[str]  # the prepared set; a property where a field decides

    root: Name = "downloads"  # the folder given to data.prepare

    @functools.cached_property
    def stored(self) -> PreparedSet:
        return open_set(self.root, self.set_name)

    @property
    def on_disk(self) -> bool:
        """Whether it is; a task may have another source, of which examples are made."""
        return True

    def check(self) -> None:
        if self.on_disk:
            open_set(self.root, self.set_name)  # one that is not there is said before anything is built

    def rows(self, split: str, places: np.ndarray) -> Example:
        """Examples `places` [B] of a split, stacked: what such a task defines."""
        raise NotImplementedError

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        return self.rows(split, np.arange(index, index + self.block))

    def parameters(self) -> dict[str, Any]:
        """Where the bytes lie does not matter, only which they are."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "root"}

    def content(self) -> Iterable[bytes]:
        return (self.stored.digest.encode(),) if self.on_disk else ()
