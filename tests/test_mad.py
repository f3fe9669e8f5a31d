"""The six tasks of MAD: each law, by a reader that shares no code with it; and the head that decodes one vector."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data import build
from data.mad import shown_before
from model.asked import Asked
from model.errors import UserError
from model.heads import DecodedHead, HeadContext
from tests.test_data import examples, holds
from train import config as configs
from train.run import prepare

RECALL = [("mad_recall", {}), ("mad_noisy_recall", {"noise": 0.4, "vocab_size": 20, "noise_size": 4})]
SMALL = {"length": 40, "n_train": 400, "n_test": 400}


def asked_at(e: dict) -> list[int]:
    return np.flatnonzero(e["weights"]).tolist()


@pytest.mark.quick
def test_sets_have_the_published_sizes():
    for name in ("recall", "fuzzy_recall", "noisy_recall", "selective_copying", "compression", "memorization"):
        sizes = build(f"mad_{name}", {}).sizes()
        assert sizes == {"train": 256 if name == "memorization" else 12_800, "validation": 1_280, "test": 1_280}


@pytest.mark.quick
def test_places_where_keys_were_shown():
    keys = np.random.default_rng(0).integers(5, size=(30, 12))
    first, last = shown_before(keys)
    for row, firsts, lasts in zip(keys.tolist(), first, last, strict=True):
        for i, key in enumerate(row):
            assert firsts[i] == row.index(key)
            assert lasts[i] == max((j for j in range(i) if row[j] == key), default=-1)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "section"), RECALL)
def test_recall_asks_for_the_values_of_keys_that_were_shown(name, section):
    task = build(name, SMALL | section)
    n_noise = section.get("noise_size", 0)
    half = (task.vocab_size - n_noise) // 2
    noise, last_keys = 0, Counter()
    for e in examples(task, "test", 400):
        row, bound, asked = e["inputs"].tolist(), {}, {}
        for i in range(0, 40, 2):
            key, value = row[i : i + 2]
            if key >= 2 * half:
                assert value >= 2 * half, "noise comes in pairs"
                noise += 1
                continue
            assert key < half <= value < 2 * half
            if key in bound:
                asked[i] = i - bound[key][1]
                assert bound[key][0] == value
            bound[key] = value, i
        assert asked_at(e) == list(asked) and 38 in asked, "every key but new ones, the last among them"
        assert [e["targets"][i] for i in asked] == [row[i + 1] for i in asked]
        assert all(holds(task.attributes["distance"][e["attr_distance"][i]], d) for i, d in asked.items())
        last_keys[row[38]] += 1
    assert noise / (400 * 20) == pytest.approx(section.get("noise", 0) * 18 / 20, abs=0.02)
    assert len(last_keys) == half and task.baselines() == {"chance": 1 / half}


@pytest.mark.quick
@pytest.mark.parametrize("name", ["mad_recall", "mad_noisy_recall", "mad_fuzzy_recall"])
def test_recall_trains_on_every_next_token(name):
    task = build(name, SMALL)
    for e in examples(task, "train", 20):
        asked = asked_at(e)
        assert asked == list(range(40 if name == "mad_fuzzy_recall" else 39))
        assert e["targets"][:39].tolist() == e["inputs"][1:].tolist()
    with pytest.raises(UserError, match="asks for the next token, and this model sees it"):
        prepare(configs.load("configs/debug.py", [("data.task", name), ("model.causal", "False")]))


@pytest.mark.quick
def test_the_last_key_is_any_of_those_shown_however_often():
    task = build("mad_recall", {"length": 8, "vocab_size": 4, "n_train": 4096})
    rare = Counter()
    for e in examples(task, "train", 4096):
        keys = e["inputs"][0:6:2].tolist()
        if keys.count(0) == 1:
            rare[int(e["inputs"][6])] += 1
    assert rare[0] / rare.total() == pytest.approx(1 / 2, abs=0.05), "a key shown once of three is taken half the time"


def read_fuzzy(tokens: list[int], half: int, pad: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Keys and values as the runs of ids below and from `half`."""
    runs = [tuple(run) for _, run in itertools.groupby(itertools.dropwhile(pad.__eq__, tokens), lambda t: t >= half)]
    assert pad not in itertools.chain(*runs) and runs[0][0] < half, "padding stands in front"
    return list(zip(runs[::2], runs[1::2], strict=True))


@pytest.mark.quick
@pytest.mark.parametrize("split", ["train", "test"])
def test_fuzzy_recall_binds_keys_of_several_tokens(split):
    task = build("mad_fuzzy_recall", SMALL | {"vocab_size": 10})
    sizes, value_sizes, padding, probed = Counter(), Counter(), Counter(), Counter()
    for e in examples(task, split, 400):
        tokens = [*e["inputs"].tolist(), int(e["targets"][-1])]
        pairs = read_fuzzy(tokens, half=4, pad=9)
        bound, place, expected = {}, tokens.count(9), {}
        padding[place] += 1
        probed[[key for key, _ in pairs].index(pairs[-1][0])] += 1
        for key, value in pairs:
            assert len(set(key)) == len(key) <= 3 and len(set(value)) == len(value) <= 3
            if key in bound:
                assert bound[key][0] == value
                for i in range(len(value)):
                    expected[place + len(key) + i - 1] = place - bound[key][1]
            bound[key] = value, place
            sizes[len(key)] += 1
            value_sizes[len(value)] += 1
            place += len(key) + len(value)
        assert place == 41 and pairs[-1][0] in [key for key, _ in pairs[:-1]], "the last key was shown"
        assert e["targets"].tolist() == tokens[1:]
        if split == "test":
            assert asked_at(e) == list(expected)
        for i, distance in expected.items():
            assert holds(task.attributes["distance"][e["attr_distance"][i]], distance)
    assert set(sizes) == ({1, 2, 3} if split == "train" else {3}), "tests have the longest keys alone"
    assert max(sizes.values()) < 1.2 * min(sizes.values()) and max(value_sizes.values()) < 1.4 * min(
        value_sizes.values()
    )
    assert min(padding) >= 2 and max(padding) <= 2 + 6 and len(probed) > 4


@pytest.mark.quick
def test_selective_copying_of_mad_puts_blanks_before_tokens():
    L, V, Q = 30, 8, 4
    task = build("mad_selective_copying", {"length": L, "vocab_size": V, "n_tokens": Q, "n_train": 3200})
    before = np.zeros(Q)
    for e in examples(task, "train", 3200):
        row = e["inputs"].tolist()
        assert row[L - Q - 1 :] == [V - 1] + [V - 2] * Q and row[L - Q - 2] < V - 2, "the last token, mark, blanks"
        places = [i for i in range(L - Q - 1) if row[i] < V - 2]
        assert [row[i] for i in places] == e["targets"].tolist() and e["at"].tolist() == list(range(L - Q, L))
        before += np.diff([-1, *places]) - 1
    blanks = L - 2 * Q - 1
    assert np.abs(before / 3200 - blanks / Q).max() < 5 * (blanks * (1 / Q) * (1 - 1 / Q) / 3200) ** 0.5


@pytest.mark.quick
def test_memorization_asks_for_the_same_facts_in_every_split():
    task, other = build("mad_memorization", {}), build("mad_memorization", {"facts": 1})
    known: dict[int, int] = {}
    for split in ("train", "validation", "test"):
        for e in examples(task, split, 256):
            assert (e["inputs"][1::2] == 255).all() and e["at"].tolist() == list(range(1, 32, 2))
            for key, value in zip(e["inputs"][::2].tolist(), e["targets"].tolist(), strict=True):
                assert key < 127 <= value < 255 and known.setdefault(key, value) == value
    assert len(known) == len(set(known.values())) == 127
    assert any(
        known[k] != v for e in examples(other, "train", 2) for k, v in zip(e["inputs"][::2], e["targets"], strict=True)
    )
    assert task.baselines() == {"chance": 1 / 128}


@pytest.mark.quick
def test_compression_asks_for_its_row():
    task = build("mad_compression", {})
    for split, last in (("train", 1), ("test", 0)):
        for e in examples(task, split, 50):
            assert (e["targets"] == e["inputs"]).all() and e["inputs"][-1] == 15 and e["inputs"][:-1].max() < 15
            assert e["weights"].tolist() == [1] * 31 + [last], "the mark tells nothing and counts in training alone"
            labels = task.attributes["distance"]
            assert all(holds(labels[b], 31 - i) for i, b in enumerate(e["attr_distance"][:-1]))


@pytest.mark.quick
def test_labels_are_decoded_from_the_last_vector_alone():
    head = DecodedHead(n_classes=5)
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    segments, at = jnp.array([[1] * 6, [1] * 4 + [0] * 2]), jnp.array([[4, 1], [0, 0]])

    @jax.jit
    def found(x):
        params = head.init(jax.random.key(1), x, HeadContext(segments))
        answers, pull = jax.vjp(lambda x: head.apply(params, x, HeadContext(segments)), x)
        return answers, pull(jnp.ones_like(answers))[0], head.apply(params, x, HeadContext(segments, at))

    answers, gradient, some = found(x)
    assert answers.shape == (2, 6, 5)
    depends = (jnp.abs(gradient).sum(-1) > 0).tolist()
    assert depends == [[False] * 5 + [True], [False] * 3 + [True] + [False] * 2], "the last that is no padding"
    assert len(np.unique(np.asarray(answers[0]).round(4), axis=0)) == 6, "places differ"
    np.testing.assert_allclose(some, jnp.take_along_axis(answers, at[..., None], axis=1), rtol=1e-5)


@pytest.mark.quick
def test_a_model_for_compression_has_that_head():
    run = prepare(configs.load("configs/debug.py", [("data.task", "mad_compression")]))
    assert run.task.asked == Asked(16, 16, labels=True, from_last=True)
    assert {"decode_0", "decode_1", "classes"} < set(run.abstract.params)
    with pytest.raises(UserError, match="reads a source and answers it"):
        prepare(configs.load("configs/debug.py:arch=transformer", [("data.task", "mad_compression")]))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "section", "says"),
    [
        ("mad_recall", {"length": 33}, "length is 33; allowed: .* even; closest: 34"),
        ("mad_recall", {"n_train": 0}, "n_train is 0; allowed: a whole number from 1 "),
        ("mad_noisy_recall", {"noise_size": 31}, "noise_size is 31; allowed: 1 to 30 .*; closest: 30"),
        ("mad_noisy_recall", {"noise": 1.0}, "noise is 1.0; allowed: .* below 1"),
        ("mad_fuzzy_recall", {"key_size": 8}, "key_size is 8; allowed: 1 to 7 .*; closest: 7"),
        ("mad_fuzzy_recall", {"vocab_size": 8192, "key_size": 5}, "key_size is 5; allowed: 1 to 4 .*; closest: 4"),
        ("mad_fuzzy_recall", {"length": 17}, "length is 17; allowed: at least 18 .*; closest: 18"),
        ("mad_selective_copying", {"length": 32}, "n_tokens is 16; allowed: 1 to 15 .*; closest: 15"),
    ],
)
def test_mistakes_are_told_in_one_line(name, section, says):
    with pytest.raises(UserError, match=says) as error:
        build(name, section)
    assert "\n" not in str(error.value)
