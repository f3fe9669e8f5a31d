"""The laws of the tasks of real vectors, pictures and pairs, by solvers that share no code with them."""

import math
from collections import Counter

import numpy as np
import pytest

from data import build
from data.shape_questions import WORDS
from data.shapes import COLOURS, SHAPES
from eval.continuation import check_tokens
from model.errors import UserError
from tests.test_data import examples, holds

# --- adding ---


@pytest.mark.quick
def test_adding_asks_for_the_part_that_the_marked_numbers_add_up_to():
    L, C, n = 20, 8, 2000
    task = build("adding", {"length": L, "n_classes": C})
    places, classes = Counter(), Counter()
    for e in examples(task, "train", n):
        numbers, marks = e["inputs"].T
        first, second = np.flatnonzero(marks)
        assert set(marks.tolist()) == {0, 1} and first < L / 2 <= second
        assert 0 <= numbers.min() and numbers.max() < 1
        total = float(numbers[first]) + float(numbers[second])
        assert e["targets"] / C <= total / 2 < (e["targets"] + 1) / C
        assert holds(task.attributes["distance"][e["attr_distance"]], second - first)
        places.update((int(first), int(second)))
        classes[int(e["targets"])] += 1
    assert set(places) == set(range(L)) and max(places.values()) < 2 * min(places.values())
    assert set(classes) == set(range(C))
    assert task.baselines()["majority"] == pytest.approx(max(classes.values()) / n, abs=0.04)
    assert task.baselines()["one of the two"] == 2 / C


@pytest.mark.quick
@pytest.mark.parametrize("C", [2, 4, 10])
def test_adding_knows_how_far_one_of_the_two_numbers_leads(C):
    x = np.linspace(0, 1, 10_001)[:, None]  # the one that is known
    low = np.arange(C) * 2 / C
    right = np.minimum(low + 2 / C, x + 1) - np.maximum(low, x)  # how often a class is, behind it
    told = build("adding", {"n_classes": C}).baselines()["one of the two"]
    assert told == pytest.approx(right.max(1).mean(), rel=1e-3)


# --- shapes ---


def coloured(picture: np.ndarray) -> np.ndarray:
    """The pixels whose channels differ: clutter is grey."""
    return picture.max(-1) > picture.min(-1)


def recognise(mask: np.ndarray) -> str:
    """The shape of some pixels, by what lies in the corners, the middle and the quarters of their box."""
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    n = len(box)
    assert abs(box.shape[0] - box.shape[1]) <= 1
    if box[0, 0] and box[0, -1]:
        return "square"
    if box[-1, 0] or box[-1, -1]:
        return "triangle"
    if not box[n // 2, box.shape[1] // 2]:
        return "ring"
    # The last pixel of the first third, down and right: a cross leaves it out, a diamond has it.
    near = math.ceil(n / 3 - 0.5) - 1
    if not box[near, near]:
        return "cross"
    return "disc" if box.mean() > 0.65 else "diamond"


def colour_of(picture: np.ndarray, mask: np.ndarray) -> str:
    (colour,) = {tuple(pixel) for pixel in picture[mask].tolist()}
    return {(1, 0, 0): "red", (0, 1, 0): "green", (0, 0, 1): "blue"}.get(colour) or {
        (1, 1, 0): "yellow",
        (1, 0, 1): "magenta",
        (0, 1, 1): "cyan",
    }[colour]


@pytest.mark.quick
@pytest.mark.parametrize("side", [32, 45])
def test_a_shape_is_told_by_its_pixels(side):
    task = build("shapes", {"side": side})
    kinds, colours, sizes = Counter(), Counter(), Counter()
    for e in examples(task, "train", 600):
        picture = e["inputs"]
        mask = coloured(picture)
        assert 0 <= picture.min() and picture.max() <= 1
        assert recognise(mask) == list(SHAPES)[e["targets"]]
        across = int(mask.any(1).sum())
        kinds[int(e["targets"])] += 1
        colours[colour_of(picture, mask)] += 1
        sizes[across] += 1
        assert e["targets"] != 0 or holds(task.attributes["across"][e["attr_across"]], across)
    assert set(kinds) == set(range(6)) and set(colours) == set(COLOURS)
    assert max(kinds.values()) < 2 * min(kinds.values()) and max(colours.values()) < 2 * min(colours.values())
    assert max(sizes) == side // 2 and min(sizes) <= 8
    assert task.baselines() == {"chance": pytest.approx(1 / 6)}


@pytest.mark.quick
def test_questions_are_answered_by_the_one_shape_that_fits():
    task = build("shape_questions", {"n_shapes": 3})
    asked = Counter()
    for e in examples(task, "train", 400):
        picture, (what, by, end) = e["image"], (WORDS[token] for token in e["inputs"])
        assert end == "?" and e["at"].tolist() == [2]
        seen = {}
        for y in (0, 16):
            for x in (0, 16):
                part = picture[y : y + 16, x : x + 16]
                if (mask := coloured(part)).any():
                    seen[recognise(mask)] = colour_of(part, mask)
        assert len(seen) == len(set(seen.values())) == 3
        found = seen[by] if "colour" in what else {colour: shape for shape, colour in seen.items()}[by]
        assert WORDS[e["targets"][0]] == found
        assert task.attributes["asked"][e["attr_asked"][0]] in what
        asked[what] += 1
    assert len(asked) == 2 and min(asked.values()) > 150
    assert task.baselines() == {"chance": pytest.approx(1 / 6), "any one shown": pytest.approx(1 / 3)}


# --- matching ---


@pytest.mark.quick
def test_documents_match_if_their_topic_words_are_the_same():
    N, K = 10, 4
    task = build("matching", {"length": 12, "vocab_size": 24, "n_noise": N, "n_topics": K, "positives": 0.3})
    lengths, matches = Counter(), 0
    for e in examples(task, "train", 1000):
        sets = []
        for rows in ("inputs", "other"):
            whose = e["segments" if rows == "inputs" else "other_segments"]
            n = int(whose.sum())
            assert whose.tolist() == [1] * n + [0] * (12 - n) and not e[rows][n:].any() and e[rows][:n].all()
            topics = [word for word in e[rows].tolist() if word > N]
            assert len(topics) == len(set(topics)) == K
            sets.append(set(topics))
            lengths[n] += 1
        assert len(sets[0] & sets[1]) == (K if e["targets"] else K - 1)
        longer = max(int(e["segments"].sum()), int(e["other_segments"].sum()))
        assert holds(task.attributes["length"][e["attr_length"]], longer)
        matches += int(e["targets"])
        assert not np.array_equal(e["inputs"], e["other"])
    assert set(lengths) == set(range(K, 13)) and max(lengths.values()) < 2 * min(lengths.values())
    assert matches / 1000 == pytest.approx(0.3, abs=0.05)
    assert task.baselines() == {"majority": 0.7}
    assert all(e["targets"] for e in examples(build("matching", {"positives": 1.0}), "train", 200))


@pytest.mark.quick
def test_suites_of_token_rows_refuse_other_tasks():
    for name, says in {"shapes": "real numbers", "shape_questions": "an image", "matching": "pairs of rows"}.items():
        with pytest.raises(UserError, match=f"task '{name}' brings {says}.*; allowed: --suite=accuracy"):
            check_tokens(build(name, {}))
    check_tokens(build("mqar", {}))
