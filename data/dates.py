"""Dates written in many ways, to be written in one, letter by letter."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import ClassVar

import numpy as np

from data.source_target import FIRST, SourceTask, paired
from data.task import Example
from model.errors import UserError

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FIRST_DAY, LAST_DAY = date(1950, 1, 1).toordinal(), date(2049, 12, 31).toordinal()  # two digits name the year


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, 12th, 13th, ..."""
    last = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{last}"


# Numbers alone: slashes are month/day/year, dots and dashes day before month, so that every date has one meaning.
STYLES: tuple[Callable[[date], str], ...] = (
    lambda d: f"{d.day} {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{MONTHS[d.month - 1]} {d.day}, {d.year}",
    lambda d: f"{MONTHS[d.month - 1]} {ordinal(d.day)}, {d.year}",
    lambda d: f"the {ordinal(d.day)} of {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{WEEKDAYS[d.weekday()]}, {d.day} {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{WEEKDAYS[d.weekday()]}, the {ordinal(d.day)} of {MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{d.day} {MONTHS[d.month - 1][:3]} {d.year}",
    lambda d: f"{MONTHS[d.month - 1][:3]} {d.day} '{d.year % 100:02}",
    lambda d: f"{WEEKDAYS[d.weekday()][:3]} {MONTHS[d.month - 1][:3]} {d.day} {d.year}",
    lambda d: f"{d.month}/{d.day}/{d.year}",
    lambda d: f"{d.month:02}/{d.day:02}/{d.year % 100:02}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d.day:02}.{d.month:02}.{d.year % 100:02}",
    lambda d: f"{d.day}-{MONTHS[d.month - 1][:3]}-{d.year}",
    lambda d: f"{d.year}, {MONTHS[d.month - 1]} {d.day}",
    lambda d: f"{d.year}{d.month:02}{d.day:02}",
)
CASES: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper)

CHARACTERS = " ',-./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
LONGEST_DATE = len("Wednesday, the 23rd of September 2026")


@dataclass(frozen=True)
class Dates(SourceTask):
    """A date from 1950 to 2049 written in one of many ways, letter by letter: write it as YYYY-MM-DD.

    The splits share no day: of every ten in a row, one is for tests and one for validation.
    """

    name: ClassVar[str] = "dates"
    length: ClassVar[int] = LONGEST_DATE + 3  # tokens of a source, its end included, rounded up
    target_length: ClassVar[int] = len("2026-11-16") + 2
    vocab_size: ClassVar[int] = FIRST + len(CHARACTERS)

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        B = self.block
        tens = rng.integers(FIRST_DAY // 10 + 1, LAST_DAY // 10, B)
        last = {"test": rng.integers(0, 1, B), "validation": rng.integers(1, 2, B)}.get(split, rng.integers(2, 10, B))
        styles, cases = rng.integers(len(STYLES), size=B), rng.integers(len(CASES), size=B)
        days = [date.fromordinal(int(day)) for day in 10 * tens + last]
        written = [CASES[case](STYLES[style](day)) for day, style, case in zip(days, styles, cases, strict=True)]
        sources, answers = ([ids(text) for text in texts] for texts in (written, map(date.isoformat, days)))
        return paired(sources, answers, self.length, self.target_length)

    def encode(self, text: str) -> list[int]:
        wrong = [character for character in text if character not in CHARACTERS]
        if wrong or not text:
            given = f"holds {wrong[0]!r}" if wrong else "is empty"
            raise UserError(f"source {given}; task dates takes letters, digits and {CHARACTERS[:6]!r}")
        return self.closed(ids(text))

    def decode(self, token: int) -> str:
        return CHARACTERS[token - FIRST] if token >= FIRST else ""

    def baselines(self) -> dict[str, float]:
        # The two dashes and the end are always there; a digit is guessed.
        return {"chance": 1 / (self.vocab_size - FIRST + 1), "dashes and the end": 3 / 11}


def ids(text: str) -> list[int]:
    return [FIRST + CHARACTERS.index(character) for character in text]
