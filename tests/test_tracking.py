"""Words of permutation groups: labels by doing one permutation after another."""

from collections import Counter

import numpy as np
import pytest

from data import build
from data.permutations import elements, products
from tests.test_data import examples, holds

ORDERS = {"S3": 6, "A4": 12, "S4": 24, "A5": 60, "S5": 120}


def sign(permutation: list[int]) -> int:
    """By the lengths of its cycles."""
    seen, out = set(), 1
    for start in permutation:
        length = 0
        while start not in seen:
            seen.add(start)
            start, length = permutation[start], length + 1
        out *= (-1) ** max(length - 1, 0)
    return out


@pytest.mark.quick
@pytest.mark.parametrize(("group", "order"), ORDERS.items())
def test_groups_have_all_their_elements_and_are_closed(group, order):
    found = [tuple(row) for row in elements(group).tolist()]
    assert len(set(found)) == len(found) == order and all(sorted(p) == list(range(int(group[1]))) for p in found)
    assert {sign(list(p)) for p in found} == ({1} if group[0] == "A" else {1, -1})
    table = products(group)
    assert all(sorted(line) == list(range(order)) for line in (*table, *table.T)), "a Latin square"
    for a, b in np.random.default_rng(0).integers(order, size=(50, 2)):
        done = tuple(found[a][found[b][point]] for point in range(int(group[1])))
        assert found[table[a, b]] == done, "first b, then a"


@pytest.mark.quick
@pytest.mark.parametrize("group", ["S3", "S5"])
def test_labels_are_the_permutations_done_so_far(group):
    task = build("permutations", {"length": 9, "group": group})
    found, labels = elements(group).tolist(), Counter()
    assert task.vocab_size == task.n_classes == ORDERS[group]
    for e in examples(task, "train", 1280):
        points = {point: point for point in range(int(group[1]))}  # where each is by now
        for t, (token, label) in enumerate(zip(e["inputs"], e["targets"], strict=True)):
            points = {point: found[token][now] for point, now in points.items()}
            assert list(points.values()) == found[label]
            assert holds(task.attributes["position"][e["attr_position"][t]], t + 1)
        labels[int(e["targets"][-1])] += 1
    assert len(labels) == ORDERS[group] and max(labels.values()) < 4 * 1280 / ORDERS[group]
    assert task.baselines() == {"chance": 1 / ORDERS[group]}
