"""Copying, lookup by position, delayed recall and recall of many sizes: each law by a reader of its own."""

from collections import Counter

import numpy as np
import pytest

from data import build
from data.pipeline import batch_at, eval_batches
from model.errors import UserError
from tests.test_data import examples, holds, whole


@pytest.mark.quick
def test_copying_asks_for_the_first_tokens_at_the_end():
    L, V, Q = 30, 6, 4
    task = build("copying", {"length": L, "vocab_size": V, "n_tokens": Q})
    tokens = Counter()
    for e in examples(task, "train", 300):
        row = e["inputs"].tolist()
        assert row[:Q] == e["targets"].tolist() and row[Q:] == [0] * (L - 2 * Q) + [V - 1] * Q
        assert e["at"].tolist() == list(range(L - Q, L)) and e["attr_place"].tolist() == list(range(Q))
        tokens.update(row[:Q])
    assert set(tokens) == set(range(1, V - 1)) and max(tokens.values()) < 1.4 * min(tokens.values())
    assert task.baselines() == {"chance": 1 / 4} and task.tail == Q


@pytest.mark.quick
def test_lookup_answers_the_place_that_digits_name():
    task = build("lookup", {"length": 150, "vocab_size": 30, "n_questions": 5, "digits": 3})
    mark, zero, places = 29, 19, Counter()
    for e in examples(task, "test", 300):
        row = e["inputs"].tolist()
        words, questions = row[:130], row[130:]
        assert max(words) < zero
        for q in range(5):
            question = questions[4 * q : 4 * q + 4]
            assert question[0] == mark
            place = int("".join(str(token - zero) for token in question[1:]))
            assert e["targets"][q] == words[place - 1]
            assert e["at"][q] == 130 + 4 * q + 3
            assert holds(task.attributes["position"][e["attr_position"][q]], place)
            assert holds(task.attributes["distance"][e["attr_distance"][q]], e["at"][q] - (place - 1))
            places[place] += 1
    assert set(places) == set(range(1, 131)) and task.baselines() == {"chance": 1 / 19}


@pytest.mark.quick
def test_delayed_recall_asks_for_the_one_token_to_keep():
    task = build("delayed_recall", {"length": 65, "vocab_size": 8, "min_distance": 3})
    far, kept = Counter(), Counter()
    for e in examples(task, "train", 1920):
        row = e["inputs"].tolist()
        place = next(i for i, token in enumerate(row) if token < 4)
        assert row[-1] == 7 and all(4 <= token < 7 for token in row[:place] + row[place + 1 : -1])
        assert e["targets"].tolist() == [row[place]] and e["at"].tolist() == [64]
        label = task.attributes["distance"][e["attr_distance"][0]]
        assert holds(label, 64 - place) and 64 - place >= 3
        far[label] += 1
        kept[row[place]] += 1
    assert set(far) == {"2-3", "4-7", "8-15", "16-31", "32-63", "64-127"}
    assert max(far.values()) < 1.3 * min(far.values()), "each power of two is as likely"
    assert set(kept) == {0, 1, 2, 3}


@pytest.mark.quick
def test_delayed_recall_at_another_length_has_one_distance():
    task = build("delayed_recall", {})
    for length in (2, 9, 600):
        other = build("delayed_recall", task.resized(length))
        assert all(e["inputs"][0] < 8 and e["inputs"].size == length for e in examples(other, "test", 30))


MIX = {"length": 64, "vocab_size": 128, "train": ((16, 2, 50), (64, 10, 30)), "test": ((16, 4), (32, 8)), "n_test": 33}


@pytest.mark.quick
def test_a_mix_has_as_many_rows_of_each_size_as_it_says():
    task = build("mqar_mix", MIX)
    assert task.sizes() == {"train": 80, "validation": 66, "test": 66}
    labels = task.attributes["setting"]
    assert labels == ("16 tokens, 2 pairs", "16 tokens, 4 pairs", "32 tokens, 8 pairs", "64 tokens, 10 pairs")
    for split, sizes in (("train", {(16, 2): 50, (64, 10): 30}), ("test", {(16, 4): 33, (32, 8): 33})):
        found = Counter()
        for e in examples(task, split, task.size(split)):
            L, K = int(e["segments"].sum()), int(e["weights"].sum())
            found[L, K] += 1
            assert e["segments"].tolist() == [1] * L + [0] * (64 - L) and not e["inputs"][L:].any()
            assert {labels[b] for b in e["attr_setting"]} == {f"{L} tokens, {K} pairs"}
            bound = dict(zip(e["inputs"][0 : 2 * K : 2].tolist(), e["inputs"][1 : 2 * K : 2].tolist(), strict=True))
            at = e["at"][:K]
            assert len(bound) == K and at.min() >= 2 * K and at.max() < L
            assert [bound[key] for key in e["inputs"][at].tolist()] == e["targets"][:K].tolist()
            assert task.length - task.tail <= at.min()
        assert found == sizes
    rows = [row.tobytes() for batch in eval_batches(task, 0, "test", 33) for row in whole(batch)["inputs"]]
    assert len(set(rows)) == 66, "no two of a block are the same"
    assert set(np.unique(batch_at(task, 0, "train", 40, 0)["segments"].sum(1))) == {16, 64}, "batches mix them"


@pytest.mark.quick
def test_a_mix_at_another_length_has_as_many_pairs_as_fit():
    task = build("mqar_mix", MIX)
    for length in (16, 96):
        other = build("mqar_mix", MIX | task.resized(length))
        assert other.sizes()["test"] == 33
        for e in examples(other, "test", 33):
            assert e["segments"].sum() == length and e["weights"].sum() == length // 4


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "section", "says"),
    [
        ("copying", {"length": 19}, "n_tokens is 10; allowed: 1 to 9 .*; closest: 9"),
        ("lookup", {"length": 40}, "length is 40; allowed: at least 41 .*; closest: 41"),
        ("lookup", {"digits": 1, "length": 99}, "length is 99; allowed: 3 to 25 .*; closest: 25"),
        ("delayed_recall", {"min_distance": 256}, "min_distance is 256; allowed: 1 to 255 .*; closest: 255"),
        ("permutations", {"group": "S6"}, "group is 'S6'; allowed: S3, A4, S4, A5, S5"),
        ("mqar_mix", {"length": 128}, "length is 128; allowed: at least 256 .*; closest: 256"),
        ("mqar_mix", {"test": ()}, "test is empty; allowed: at least one length"),
        ("mqar_mix", {"test": ((64, 17),)}, "asks for 17 pairs in 64 tokens: .* allowed: 1 to 16"),
    ],
)
def test_mistakes_are_told_in_one_line(name, section, says):
    with pytest.raises(UserError, match=says) as error:
        build(name, section)
    assert "\n" not in str(error.value)
