"""Tasks with a source and a target: each one's law, by a solver that shares no code with it."""

import re
from datetime import date, datetime

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import SPLITS, TASKS, build
from data.dates import STYLES
from data.source_target import SourceTask
from data.translate import Translate
from model.errors import UserError
from tests.test_data import examples, holds
from train.objective import exact

NAMES = [name for name, task in TASKS.items() if issubclass(task, SourceTask)]


def pair(e: dict[str, np.ndarray]) -> tuple[list[int], list[int]]:
    """Source and answer without their ends."""
    return tuple([int(x) for x in e[key] if x > 2] for key in ("source", "targets"))


@pytest.mark.parametrize("name", NAMES)
def test_rows_begin_end_and_are_padded_as_they_say(name):
    task = build(name, {})
    lengths = set()
    for e in examples(task, "train", 200):
        source, answer = pair(e)
        assert e["source"].tolist() == [*source, 2, *[0] * (task.length - len(source) - 1)]
        assert e["targets"].tolist() == [*answer, 2, *[0] * (task.target_length - len(answer) - 1)]
        assert e["inputs"].tolist() == [1, *answer, *[0] * (task.target_length - len(answer) - 1)]
        assert e["source_segments"].tolist() == [int(x != 0) for x in e["source"]]
        assert e["segments"].tolist() == e["weights"].tolist() == [int(x != 0) for x in e["targets"]]
        label = task.attributes["length"][e["attr_length"][0]]
        assert holds(label, len(source) + 1)
        assert set(e["attr_length"][e["weights"] > 0]) == {e["attr_length"][0]}
        lengths.add(len(source))
    assert len(lengths) > 10
    assert task.asked.source == task.length and task.asked.tail == 0


@pytest.mark.parametrize(
    ("name", "solve"),
    [("copy", list), ("reverse", lambda s: s[::-1]), ("sort", sorted)],
)
def test_strings(name, solve):
    task = build(name, {"length": 9, "min_length": 3, "vocab_size": 8})
    seen, lengths, ends = [], [], 0
    for e in examples(task, "test", 500):
        source, answer = pair(e)
        assert answer == solve(source)
        seen += source
        lengths.append(len(source) + 1)
        ends += len(answer) + 1
    assert set(seen) == set(range(3, 8)) and set(lengths) == set(range(3, 10))
    assert task.baselines()["always the end"] == pytest.approx(500 / ends, rel=0.05)
    assert task.baselines()["chance"] == 1 / 6


def test_another_length_is_that_of_every_source():
    for name in ("reverse", "translate"):
        task = build(name, {})
        longer = build(name, task.resized(30))
        assert {len(pair(e)[0]) for e in examples(longer, "test", 50)} == {29}


MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


def read_date(text: str) -> date:
    """What a reader makes of a date, from its words and numbers alone."""
    text = text.lower()
    named = [m for m in MONTHS if re.search(rf"\b{m}", text)]
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if re.fullmatch(r"\d{8}", text):
        return datetime.strptime(text, "%Y%m%d").date()
    if named:
        (month,), year = named, max(numbers, key=lambda n: (n > 31, n)) if "'" not in text else numbers[-1]
        numbers.remove(year)
        year = year if year > 99 else year + (1900 if year >= 50 else 2000)
        return date(year, MONTHS.index(month) + 1, numbers[0])
    month, day, year = numbers if "/" in text else (numbers[1], numbers[0], numbers[2])
    return date(year if year > 99 else year + (1900 if year >= 50 else 2000), month, day)


def test_dates():
    task = build("dates", {})
    days = {}
    for split in SPLITS:
        days[split] = set()
        for e in examples(task, split, 600):
            source, answer = ("".join(map(task.decode, ids)) for ids in pair(e))
            assert answer == read_date(source).isoformat(), source
            if weekday := re.match(r"(mon|tue|wed|thu|fri|sat|sun)", source.lower()):
                assert read_date(source).strftime("%a").lower() == weekday[1]
            days[split].add(answer)
    assert not (days["train"] & days["test"] or days["train"] & days["validation"] or days["test"] & days["validation"])
    assert min(days["train"])[:3] == "195" and max(days["train"])[:3] == "204"
    longest = max(len(style(date(2026, 9, 23))) for style in STYLES)
    assert longest < task.length


def parse(words: list[int], task: Translate) -> list:
    """A sentence as clauses (subject, verb, object), a noun phrase as a list of its parts from the outermost on."""
    of, starts = {}, sorted(task.lexicon.source.items(), key=lambda item: item[1])
    bounds = [start for _, start in starts] + [task.lexicon.target["and"]]
    for (kind, start), end in zip(starts, bounds[1:], strict=True):
        of |= {word: (kind, word - start) for word in range(start, end)}
    tagged, clauses = [of[word] for word in words], [[[], None, []]]
    place = 0
    for kind, number in tagged:
        if kind == "and":
            clauses.append([[], None, []])
            place = 0
        elif kind == "verb":
            clauses[-1][1], place = number, 2
        else:
            phrase = clauses[-1][place]
            if kind == "determiner":
                phrase.append({"determiner": number, "adjectives": []})
            elif kind == "adjective":
                phrase[-1]["adjectives"].append(number)
            else:
                phrase[-1][kind] = number
    return clauses


def test_translate():
    """Each phrase from the innermost out, nouns before adjectives, verbs last, forms by the noun."""
    task = build("translate", {"length": 30, "nouns": 6, "verbs": 3, "adjectives": 4, "language": 5})
    words = task.lexicon

    def meant(kind, number, form, forms):
        return words.target[kind] + forms * int(words.meaning[kind][number]) + form

    def form_of(part):
        return 3 * (part["noun"] % 2) + int(words.gender[part["noun"] // 2])

    for e in examples(task, "train", 200):
        source, answer = pair(e)
        said = []
        for subject, verb, thing in parse(source, task):
            if said:
                said.append(words.target["and"])
            for phrase in (subject, thing):
                for depth in reversed(range(len(phrase))):
                    part = phrase[depth]
                    form = form_of(part)
                    said.append(meant("determiner", part["determiner"], form, 6))
                    said.append(meant("noun", part["noun"] // 2, part["noun"] % 2, 2))
                    said += [meant("adjective", a, form, 6) for a in part["adjectives"][::-1]]
                    if depth:
                        said.append(meant("preposition", phrase[depth - 1]["preposition"], 0, 1))
            said.append(meant("verb", verb, form_of(subject[0]), 6))
        # A postposition stands between what belongs to a noun and that noun.
        assert said == answer
        assert len(answer) == len(source)


def test_a_language_is_not_of_the_data_seed():
    one, other = build("translate", {}), build("translate", {"language": 1})
    assert len(set(one.lexicon.spelling)) == len(one.lexicon.spelling) == one.vocab_size - 3
    assert one.lexicon.spelling != other.lexicon.spelling
    assert set(one.lexicon.gender.tolist()) == {0, 1, 2}
    assert all((m != np.arange(len(m))).any() for kind, m in one.lexicon.meaning.items() if kind in ("noun", "verb"))


@pytest.mark.parametrize("name", NAMES)
def test_sources_can_be_written_by_hand(name):
    task = build(name, {})
    e = examples(task, "test", 1)[0]
    source, _ = pair(e)
    assert task.encode("".join(map(task.decode, source))) == [*source, 2]
    for text, words in (("?", "source holds '\\?'"), ("", "source is empty")):
        with pytest.raises(UserError, match=words):
            task.encode(text)
    with pytest.raises(UserError, match=f"a source of .* takes up to {task.length - 1}"):
        task.encode("".join(map(task.decode, source * 40)))


@pytest.mark.quick
def test_whole_answers():
    """A row counts where every target is hit; one without targets does not count at all."""
    weights = jnp.asarray([[1.0, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]])
    hits = weights * jnp.asarray([[1, 1, 0], [1, 0, 1], [1, 0, 0], [0, 0, 0]])
    batch = {"weights": weights, "attr_length": jnp.asarray([[1, 1, 0], [2, 2, 2], [0, 0, 0], [0, 0, 0]])}
    sums = jax.tree.map(np.asarray, exact({"length": ("a", "b", "c", "d")}, batch, hits))
    assert sums["exact"] == (2, 3)
    np.testing.assert_array_equal(sums["exact/length"], [[1, 1, 0, 0], [1, 1, 1, 0]])
