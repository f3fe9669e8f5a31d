"""Translation between two made-up languages: a lexicon, another order of words, and agreement.

The source, in its own order:

    sentence    = clause | clause and sentence
    clause      = noun-phrase verb noun-phrase           subject, verb, object
    noun-phrase = determiner adjective{0,2} noun [preposition noun-phrase]

Of its words only nouns have two forms, singular and plural. The target says the same, word for word, but

    clause      = noun-phrase noun-phrase verb           the verb stands at the end
    noun-phrase = [noun-phrase postposition] determiner noun adjective{0,2}

What belongs to a noun by a preposition goes before it, the preposition behind that; adjectives follow their noun, the
one next to it first. Every noun has one of three genders, which shows nowhere in the source. Determiners and adjectives
take the gender and number of their noun, verbs those of the subject's noun, however far away that is by then.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from data.source_target import FIRST, SourceTask, paired
from data.task import Example
from model.errors import UserError
from model.settings import Seed, within

GENDERS, NUMBERS, DETERMINERS, PREPOSITIONS = 3, 2, 2, 4
FORMS = GENDERS * NUMBERS
SYLLABLES = ["".join(pair) for pair in itertools.product("bdfgklmnprstvz", "aeiou")]
ENDINGS = ("k", "m", "l", "ki", "mi", "li")  # by number and gender
SHORTEST = 5  # words of a clause
DRAWS = 3  # random numbers for a word, at most

Words = list[int]
Count = Annotated[int, within(1, 256)]


@dataclass(frozen=True)
class Lexicon:
    """The ids of both languages' words, and what nobody can tell from the source: genders, and which word is which."""

    source: dict[str, int]  # class of words -> id of its first; nouns have their forms side by side
    target: dict[str, int]
    meaning: dict[str, np.ndarray]  # class -> number in the source -> number in the target
    gender: np.ndarray  # of each noun
    spelling: tuple[str, ...]  # of each id, from FIRST on


@functools.lru_cache(maxsize=8)
def lexicon(nouns: int, verbs: int, adjectives: int, language: int) -> Lexicon:
    counts = {"and": 1, "determiner": DETERMINERS, "preposition": PREPOSITIONS}
    counts |= {"noun": nouns, "verb": verbs, "adjective": adjectives}
    forms = {"noun": NUMBERS}, {"noun": NUMBERS, "determiner": FORMS, "adjective": FORMS, "verb": FORMS}
    rng = np.random.Generator(np.random.Philox(key=language))
    stems = iter(rng.permutation(len(SYLLABLES) ** 2)[: 2 * sum(counts.values())])
    sides, spelling = [], []
    for own in forms:
        first = {}
        for kind, n in counts.items():
            first[kind] = FIRST + len(spelling)
            for stem in itertools.islice(stems, n):
                word = SYLLABLES[stem // len(SYLLABLES)] + SYLLABLES[stem % len(SYLLABLES)]
                endings = {1: ("",), NUMBERS: ("", "s"), FORMS: ENDINGS}[own.get(kind, 1)]
                spelling += [word + ending for ending in endings]
        sides.append(first)
    meaning = {kind: rng.permutation(n) for kind, n in counts.items()}
    return Lexicon(*sides, meaning, rng.integers(GENDERS, size=nouns), tuple(spelling))


@dataclass(frozen=True)
class Translate(SourceTask):
    """A sentence of a made-up language: say it in another, with its words, order and agreement.

    Sentences are as long as is drawn, uniformly, and every way to come to that length may be.
    """

    name: ClassVar[str] = "translate"

    length: Annotated[int, within(SHORTEST + 1, 1024)] = 24  # tokens of the longest source, its end included
    min_length: Annotated[int, within(SHORTEST + 1, 1024)] = SHORTEST + 1  # of the shortest
    nouns: Count = 32
    verbs: Count = 16
    adjectives: Count = 16
    language: Seed = 0  # draws the lexicon: the same whatever data.seed, which draws the sentences

    def check(self) -> None:
        self.bound("min_length", SHORTEST + 1, self.length, "length")

    def resized(self, length: int) -> dict[str, Any]:
        return {"length": length, "min_length": length}

    @property
    def lexicon(self) -> Lexicon:
        return lexicon(self.nouns, self.verbs, self.adjectives, self.language)

    @property
    def vocab_size(self) -> int:
        return FIRST + len(self.lexicon.spelling)

    def examples(self, split: str, index: int, rng: np.random.Generator) -> Example:
        lengths = rng.integers(self.min_length - 1, self.length, self.block)
        chances = rng.random(
            (self.block, DRAWS * self.length)
        )  # all at once: one by one they would take most of the time
        made = [Speaker(self.lexicon, row).sentence(int(n)) for row, n in zip(chances, lengths, strict=True)]
        return paired(*zip(*made, strict=True), self.length, self.length)

    def encode(self, text: str) -> list[int]:
        spelling = self.lexicon.spelling
        wrong = [word for word in text.split() if word not in spelling]
        if wrong or not text.split():
            given = f"holds {wrong[0]!r}" if wrong else "is empty"
            raise UserError(f"source {given}; task translate takes words such as {', '.join(spelling[:8])}")
        return self.closed([FIRST + spelling.index(word) for word in text.split()])

    def decode(self, token: int) -> str:
        return f" {self.lexicon.spelling[token - FIRST]}" if token >= FIRST else ""

    def baselines(self) -> dict[str, float]:
        return {"chance": 1 / (self.vocab_size - FIRST + 1), "always the end": 2 / (self.min_length + self.length)}


class Speaker:
    """Says one thing in both languages; n is always the number of words."""

    def __init__(self, words: Lexicon, chances: np.ndarray):
        self.words, self.chances = words, iter(chances.tolist())

    def below(self, n: int) -> int:
        return int(n * next(self.chances))

    def draw(self, kind: str) -> int:
        return self.below(len(self.words.meaning[kind]))

    def pair(self, kind: str, word: int, form: int = 0, forms: int = 1) -> tuple[Words, Words]:
        """A word without forms in the source, and its form in the target."""
        meant = int(self.words.meaning[kind][word])
        return [self.words.source[kind] + word], [self.words.target[kind] + forms * meant + form]

    def sentence(self, n: int) -> tuple[Words, Words]:
        if n <= 2 * SHORTEST or self.below(2):
            return self.clause(n)
        first = SHORTEST + self.below(n - 2 * SHORTEST)
        (s1, t1), (s2, t2), (s3, t3) = self.clause(first), self.pair("and", 0), self.sentence(n - first - 1)
        return s1 + s2 + s3, t1 + t2 + t3

    def clause(self, n: int) -> tuple[Words, Words]:
        size = 2 + self.below(n - 4)
        subject, spoken, agreed = self.noun_phrase(size)
        verb, at_end = self.pair("verb", self.draw("verb"), agreed, FORMS)
        thing, named, _ = self.noun_phrase(n - 1 - size)
        return subject + verb + thing, spoken + named + at_end

    def noun_phrase(self, n: int) -> tuple[Words, Words, int]:
        """Also the form, of number and gender, that goes with its noun."""
        sizes = [size for size in (2, 3, 4) if size == n or size + 3 <= n]
        own, noun, number = sizes[self.below(len(sizes))], self.draw("noun"), self.below(NUMBERS)
        form = GENDERS * number + int(self.words.gender[noun])
        determiner, spoken = self.pair("determiner", self.draw("determiner"), form, FORMS)
        adjectives = [self.pair("adjective", self.draw("adjective"), form, FORMS) for _ in range(own - 2)]
        meant = int(self.words.meaning["noun"][noun])
        source = [*determiner, *(word for one, _ in adjectives for word in one)]
        source.append(self.words.source["noun"] + NUMBERS * noun + number)
        target = [*spoken, self.words.target["noun"] + NUMBERS * meant + number]
        target += [word for _, one in reversed(adjectives) for word in one]
        if own < n:
            before, behind = self.pair("preposition", self.draw("preposition"))
            inner, named, _ = self.noun_phrase(n - own - 1)
            source, target = source + before + inner, named + behind + target
        return source, target, form
