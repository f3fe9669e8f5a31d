"""Needles and RULER's tasks: every row is read again, token by token, and its question answered by looking."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from data import TASKS, build
from data.haystack import ASK, FIRST, STOP, different, hide
from data.pipeline import batch_at
from data.rng import Stream
from eval.accuracy import measure
from eval.pictures import draw_grid
from eval.restore import restore
from eval.suites import SUITES
from experiments.running.runs import texts
from experiments.tables.definitions import TABLES
from model.errors import UserError
from tests.test_data import examples
from train import config as configs
from train.loop import train

pytestmark = pytest.mark.usefixtures("quickly_compiled")

FAMILY = ("passkey", "needle", "multi_key", "multi_value", "multi_query", "variable_tracking", "common_words")
WORDS = {"names": 30, "values": 20, "fillers": 9}


class Row:
    """An example in words: what its ids mean is worked out here anew."""

    def __init__(self, example, names=30, values=20):
        self.example, self.tokens = example, [int(t) for t in example["inputs"]]
        self.names, self.values = range(2, 2 + names), range(2 + names, 2 + names + values)
        self.end = self.tokens.index(ASK)

    def sentences(self) -> list[tuple[int, list[int]]]:
        """Where each begins in the haystack, and its tokens; all others there are fillers."""
        found, open_ = [], None
        for place, token in enumerate(self.tokens[: self.end]):
            if token == STOP:
                found.append(open_)
                open_ = None
            elif token in self.names or token in self.values:
                open_ = (open_ or (place, []))[0], [*(open_ or (place, []))[1], token]
            else:
                assert open_ is None and token >= self.values.stop, "no filler stands within a sentence"
        assert open_ is None
        return found

    def ending(self) -> list[int]:
        """The question and its answer, with the last word of it, which is only asked for."""
        return [*self.tokens[self.end :], int(self.example["targets"][-1])]

    def asked(self) -> list[int]:
        """The tokens of the ending that are asked for, by their places in it."""
        return [int(at) + 1 - self.end for at in self.example["at"]]

    def depth(self) -> int:
        (found,) = set(self.example["attr_depth"].tolist())
        return found


def rows(name: str, n: int = 128, **section):
    task = build(name, WORDS | section)
    made = [Row(e) for e in examples(task, "train", n)]
    for row in made:
        assert len(row.tokens) == task.length and (row.example["weights"] == 1).all()
        ending = row.ending()
        assert [ending[i] for i in row.asked()] == row.example["targets"].tolist(), (
            "teacher forcing: the answer is shown"
        )
        assert task.tail == task.length - row.example["at"][0], "the tail begins at the first place that is asked"
    return task, made


@pytest.mark.quick
def test_a_passkey_is_the_number_in_the_filler():
    task, made = rows("passkey", length=40, digits=4)
    digits, starts = Counter(), Counter()
    for row in made:
        ((start, (name, *number)),) = row.sentences()
        assert name == FIRST and row.ending() == [ASK, name, *number] and row.asked() == [2, 3, 4, 5]
        assert len(number) == 4 and all(0 <= d - row.values.start < 10 for d in number)
        rest = row.tokens[:start] + row.tokens[start + 6 : row.end]
        steps = {(b - a) % 9 for a, b in pairwise(rest)}
        assert steps == {1}, "one sentence of nine words, again and again"
        assert row.depth() == start * 10 // (row.end - 6 + 1)
        digits.update(number)
        starts[start] += 1
    assert len(digits) == 10 and {0, row.end - 6} <= set(starts), (
        "any digit, at any depth from the first token to the last"
    )
    assert task.baselines() == {"chance": 1 / 10}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "section", "n"),
    [
        ("needle", {"value_words": 3}, 1),
        ("multi_key", {"n_needles": 5, "value_words": 2}, 5),
        ("multi_key", {"n_needles": 0}, 12),
    ],
)
def test_the_value_asked_for_is_that_of_the_name(name, section, n):
    task, made = rows(name, length=40, **section)
    words, turns = section.get("value_words", 1), Counter()
    for row in made:
        bound = {tokens[0]: (start, tokens[1:]) for start, tokens in row.sentences()}
        assert len(bound) == len(row.sentences()) == n, "no two needles have one name"
        ask, key, *answer = row.ending()
        start, value = bound[key]
        assert (ask, answer) == (ASK, value) and len(value) == words and row.asked() == [*range(2, 2 + words)]
        assert row.depth() == start * 10 // (row.end - (words + 2) + 1)
        turns[sorted(bound.values()).index((start, value))] += 1
    assert set(turns) == set(range(n)), "the first of the needles is asked for, and the last, and any between"
    assert task.baselines() == {"chance": 1 / 20} | ({"any value shown": 1 / n} if n > 1 else {})


@pytest.mark.quick
def test_all_values_of_the_name_are_asked_for_in_the_vocabularys_order():
    _, made = rows("multi_value", length=48, n_values=4, value_words=2)
    for row in made:
        found = row.sentences()
        assert len(found) == 4 and len({tokens[0] for _, tokens in found}) == 1
        values = sorted(tokens[1:] for _, tokens in found)
        assert len({value[0] for value in values}) == 4
        assert row.ending() == [ASK, found[0][1][0], *(word for value in values for word in value)]
        assert row.asked() == [*range(2, 10)] and row.depth() == found[0][0] * 10 // (row.end - 4 + 1)


@pytest.mark.quick
def test_every_needle_is_asked_for_once_and_no_name_is():
    _, made = rows("multi_query", length=48, n_queries=3, value_words=2)
    in_order = 0
    for row in made:
        found = row.sentences()
        bound = {tokens[0]: tokens[1:] for _, tokens in found}
        questions = [row.ending()[i : i + 4] for i in range(0, 12, 4)]
        assert all(ask == ASK and bound[key] == value for ask, key, *value in questions)
        assert {key for _, key, *_ in questions} == set(bound) and len(bound) == 3 and len(row.ending()) == 12
        assert row.asked() == [2, 3, 6, 7, 10, 11] and row.depth() == found[0][0] * 10 // (row.end - 4 + 1)
        in_order += [key for _, key, *_ in questions] == list(bound)
    assert 0 < in_order < 64, "in any order"


@pytest.mark.quick
def test_the_variables_that_hold_a_value_are_found_by_running_the_assignments():
    _, made = rows("variable_tracking", length=64, n_chains=3, n_hops=3)
    mixed = Counter()
    for row in made:
        memory, first, order = {}, {}, []
        for start, (name, held) in row.sentences():
            value = held if held in row.values else memory[held]  # a variable is assigned before it is read
            assert name not in memory
            memory[name] = value
            first.setdefault(value, start)
            order.append(value)
        assert len(memory) == 12 and len(first) == 3
        ask, value, *answer = row.ending()
        assert ask == ASK and answer == [name for name in memory if memory[name] == value] and len(answer) == 4
        assert row.asked() == [2, 3, 4, 5] and row.depth() == first[value] * 10 // (row.end - 3 + 1)
        mixed[tuple(first).index(value)] += 1
        mixed["interleaved"] += order != sorted(order, key=order.index)
    assert {0, 1, 2} <= set(mixed) and mixed["interleaved"] > 100


@pytest.mark.quick
def test_common_words_are_those_that_come_up_more_often():
    section = {"names": 60, "n_common": 3, "common_times": 8, "other_times": 3}
    task = build("common_words", WORDS | section | {"length": 60})
    for e in examples(task, "train", 64):
        row = Row(e, names=60)
        counts = Counter(row.tokens[: row.end])
        common = sorted(word for word, times in counts.items() if times == 8)
        assert row.ending() == [ASK, *common] and row.asked() == [1, 2, 3]
        others = Counter(times for word, times in counts.items() if word not in common)
        assert others == {3: 11} and set(counts) <= set(row.names)  # 57 tokens, 24 of common words
    longer = build("common_words", WORDS | section | {"length": 61})
    last = Counter(Counter(examples(longer, "train", 1)[0]["inputs"][:58].tolist()).values())
    assert last == {8: 3, 3: 11, 1: 1}, "the last of the words comes up as often as there is room"
    assert longer.baselines() == {"chance": 1 / 60, "any word shown": 1 / 15}


@pytest.mark.quick
def test_sentences_are_hidden_anywhere_and_in_order():
    rng, n = Stream(0, "train").at(0), 4000
    sentences = np.tile([[[90, 91], [92, 93]]], (n, 1, 1))
    made, starts = hide(rng, sentences, np.tile(np.arange(5), (n, 1)))
    seen = Counter()
    for line, (a, b) in zip(made.tolist(), starts.tolist(), strict=True):
        assert line[a : a + 2] == [90, 91] and line[b : b + 2] == [92, 93] and a + 2 <= b
        assert [token for token in line if token < 90] == [0, 1, 2, 3, 4]
        seen[a, b - 2] += 1
    assert len(seen) == 21, "every two gaps between five fillers, or one gap twice"
    law = {gaps: 1 / 36 if gaps[0] == gaps[1] else 2 / 36 for gaps in seen}
    assert max(abs(seen[gaps] / n - p) / np.sqrt(p * (1 - p) / n) for gaps, p in law.items()) < 3.5


@pytest.mark.quick
@pytest.mark.parametrize("k", [3, 11])
def test_different_words_are_uniform(k):
    draws = different(Stream(0, "train").at(0), 4000, 12, k)
    assert draws.shape == (4000, k) and all(len(set(row)) == k for row in draws.tolist())
    for column in draws.T:
        assert np.abs(np.bincount(column, minlength=12) / 4000 - 1 / 12).max() < 4 * np.sqrt(1 / 12 / 4000)


@pytest.mark.quick
@pytest.mark.parametrize("length", [5, 6])
def test_majority_is_that_of_the_upper_half_and_of_the_last_token_where_halves_are_even(length):
    task, labels = build("majority", {"length": length, "vocab_size": 4}), Counter()
    for e in examples(task, "train", 200):
        upper = [token in (2, 3) for token in e["inputs"].tolist()]
        for_upper, against = upper.count(True), upper.count(False)
        assert e["targets"] == (upper[-1] if for_upper == against else for_upper > against)
        labels[int(e["targets"])] += 1
    assert min(labels.values()) > 60 and task.baselines() == {"chance": 0.5}


@pytest.mark.quick
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_haystack_of_text_is_a_stretch_of_the_splits_part(tmp_path, split):
    text = np.arange(60_000, dtype=np.uint32).astype(">u2").tobytes()  # no two stretches are alike
    (tmp_path / "book").write_bytes(text)
    words = {"names": 30, "values": 20, "length": 40}
    task = build("needle", words | {"path": str(tmp_path / "book")})
    first, end = {"train": (0, 108_000), "validation": (108_000, 114_000), "test": (114_000, 120_000)}[split]
    for e in examples(task, split, 64):
        row = Row(e)
        ((start, needle),) = row.sentences()
        around = row.tokens[:start] + row.tokens[start + 3 : row.end]
        at = text[first:end].find(bytes(token - row.values.stop for token in around))
        assert at >= 0 and row.ending() == [ASK, *needle]
    assert task.vocab_size == row.values.stop + 256
    other = tmp_path / "other"
    other.write_bytes(text)
    assert build("needle", words | {"path": str(other)}).fingerprint(0) == task.fingerprint(0)
    other.write_bytes(text[:60_003] + b"?" + text[60_004:])  # in no example that the fingerprint looks at
    assert build("needle", words | {"path": str(other)}).fingerprint(0) != task.fingerprint(0)


@pytest.mark.quick
def test_one_vocabulary_serves_the_family_and_longer_rows_keep_it():
    for name in FAMILY:
        section = {"length": 64, "names": 64} | ({"n_common": 1} if name == "common_words" else {})
        task = build(name, section)
        longer = build(name, section | task.resized(96))
        assert task.vocab_size == longer.vocab_size == 2 + 64 + 64 + 64 and TASKS[name].whole_answers
        short, long = (batch_at(one, 0, "test", 2, 0) for one in (task, longer))
        assert long["inputs"].shape == (2, 96) and (long["at"] == short["at"] + 32).all(), "asked at the end of both"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "section", "says"),
    [
        ("passkey", {"length": 12}, r"data.passkey.length is 12; allowed: at least 13 .*; closest: 13"),
        ("passkey", {"values": 9}, r"data.passkey.values is 9; allowed: a whole number from 10 .*; closest: 10"),
        ("needle", {"length": 4, "value_words": 2}, r"data.needle.length is 4; allowed: at least 7 .*; closest: 7"),
        (
            "needle",
            {"path": "/no/such/book"},
            r"'/no/such/book' does not exist; length 256 needs a text of at least 5,0",
        ),
        ("multi_key", {"n_needles": 65}, r"names is 64; allowed: at least 65 \(a name for each needle\); closest: 65"),
        ("multi_key", {"n_needles": 0, "names": 83}, r"names is 83; allowed: at least 84 .*; closest: 84"),
        ("multi_value", {"values": 3}, r"values is 3; allowed: at least 4 .*; closest: 4"),
        ("multi_query", {"names": 3}, r"names is 3; allowed: at least 4 .*; closest: 4"),
        ("variable_tracking", {"n_chains": 13}, r"names is 64; allowed: at least 65 .*; closest: 65"),
        ("variable_tracking", {"length": 20}, r"length is 20; allowed: at least 21 .*; closest: 21"),
        ("common_words", {"other_times": 30}, r"other_times is 30; allowed: 1 to 29 .*; closest: 29"),
        ("common_words", {"length": 310}, r"length is 310; allowed: at least 311 .*; closest: 311"),
        ("common_words", {"names": 247}, r"names is 247; allowed: at least 248 .*; closest: 248"),
    ],
)
def test_mistakes_are_told_in_one_line(name, section, says):
    with pytest.raises(UserError, match=says) as error:
        build(name, section)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["needle", "multi_key", "multi_value", "multi_query"])
def test_a_text_has_its_own_fillers(name, book):
    says = rf"data.{name}.fillers is 16, but the fillers of .* its bytes; closest: 64, or path=''"
    with pytest.raises(UserError, match=says):
        build(name, {"path": str(book), "fillers": 16})
    assert build(name, {"path": str(book), "length": 64, "fillers": 64}).vocab_size == 2 + 64 + 64 + 256


# --- depth by length ---


@pytest.fixture(scope="module")
def needle_run(tmp_path_factory):
    """A model that has hardly learned anything, and its result."""
    folder = tmp_path_factory.mktemp("needle")
    tiny = {"model.width": 8, "model.layers": 1, "model.mlp_width": 8, "data.needle.length": 12, "steps": 1}
    tiny |= {"test_lengths": "12,24", "eval_batches": 4, "checkpoint_every": 0}
    config = configs.load("configs/ruler.py:size=smoke", [(key, str(value)) for key, value in tiny.items()])
    return folder, train(config, str(folder))


@pytest.mark.scale
def test_a_result_has_scores_by_depth_at_every_length(needle_run):
    folder, result = needle_run
    assert result["slices"].keys() == {
        f"{test}/{metric}/depth"
        for test in ("test", "test/length_12", "test/length_24")
        for metric in ("accuracy", "exact")
    }
    for length in (12, 24):
        found = measure(restore(str(folder), "latest", [("data.needle.length", str(length))]), "test")
        for metric in ("accuracy", "exact"):
            lines = result["slices"][f"test/length_{length}/{metric}/depth"]
            known = {line["bin"]: line for line in found["slices"]["depth"]}
            assert lines.keys() == known.keys() and len(lines) == 10
            for label, value in lines.items():
                assert value == (pytest.approx(known[label][metric], abs=1e-6) if known[label]["count"] else None)
            total = sum(line["count"] for line in known.values())
            mean = sum(line["count"] * lines[label] for label, line in known.items() if line["count"]) / total
            assert mean == pytest.approx(result["metrics"][f"test/length_{length}/{metric}"], abs=1e-6)
    assert None in result["slices"]["test/length_12/exact/depth"].values(), "no needle of 4 tokens begins so deep in 10"


@pytest.mark.scale
def test_depth_by_length_is_printed_and_drawn(needle_run, capsys, monkeypatch):
    folder, result = needle_run
    drawn = []
    monkeypatch.setattr("eval.lengths.draw_grid", lambda *args: drawn.append(args) or draw_grid(*args))
    SUITES["lengths"](restore(str(folder), "latest"), split="test")
    printed = capsys.readouterr().out
    ((path, title, (name, labels), lengths, values),) = drawn
    assert (name, lengths, values.shape) == (
        "depth",
        (12, 24),
        (10, 2),
    ) and title == "needle: exact by length and depth"
    for column, length in enumerate(lengths):
        known = result["slices"][f"test/length_{length}/exact/depth"]
        assert list(labels) == list(known)
        assert values[:, column] == pytest.approx(
            [np.nan if v is None else v for v in known.values()], nan_ok=True, abs=1e-6
        )
    assert path.read_bytes().startswith(b"\x89PNG") and path.parent == folder / "eval"
    assert "length 12" in printed and "length 24" in printed and "90-100 %" in printed and str(path) in printed
    with pytest.raises(UserError, match=r"test_lengths is \(\); give those to ask at"):
        SUITES["lengths"](restore(str(folder), "latest", [("test_lengths", "()")]), split="test")


# --- the tables ---


@pytest.mark.quick
@pytest.mark.parametrize("name", ["needle", "ruler"])
@pytest.mark.parametrize("scale", ["small", "smoke"])
def test_every_task_of_the_tables_can_be_asked_at_every_length(name, scale):
    runs = {run.config.replace(run.labels["arch"], "s4d"): run for run in TABLES[name].runs(scale)}
    for spec, run in runs.items():
        config = configs.load(spec, texts(run))
        task = build(config.data.task, config.data[config.data.task].to_dict())
        assert config.test_lengths[0] == task.length and config.test_lengths[-1] >= 4 * task.length
        for length in config.test_lengths:
            longer = build(task.name, config.data[task.name].to_dict() | task.resized(length))
            assert longer.vocab_size == task.vocab_size
    assert configs.load("configs/ruler.py:arch=griffin").model.layers == 3, "with its attention, which is the third"
