"""Each task's law, by a solver that shares no code with it."""

import itertools
import statistics
from collections import Counter

import numpy as np
import pytest

from configs import recall
from data import SPLITS, Task, build
from data.listops import KNOWN, TOKENS, guessed, sampled
from data.pipeline import batch_at
from model.errors import UserError
from tests.test_data import SHORT_LISTOPS, examples, holds
from train import config as configs

# --- MQAR ---


@pytest.mark.quick
@pytest.mark.parametrize("fillers", [False, True])
def test_mqar_asks_every_key_once_for_the_value_bound_to_it(fillers):
    L, V = 64, 256
    section = {"length": L, "vocab_size": V, "n_pairs": 16, "min_pairs": 3, "random_fillers": fillers}
    task = build("mqar", section)
    counts = Counter()
    for e in examples(task, "train", 300):
        asked = e["weights"] == 1
        K = int(asked.sum())
        counts[K] += 1
        assert set(e["weights"]) <= {0, 1}
        keys, values = e["inputs"][0 : 2 * K : 2].tolist(), e["inputs"][1 : 2 * K : 2].tolist()
        bound = dict(zip(keys, values, strict=True))
        assert len(bound) == K == len(set(values))
        assert min(keys) >= 1 and max(keys) < V // 2 <= min(values) and max(values) < V
        at = e["at"][asked]
        assert sorted(e["inputs"][at]) == sorted(keys), "each key is asked once"
        assert at.min() >= 2 * K and not (at % 2).any() and len(set(at)) == K
        assert [bound[key] for key in e["inputs"][at].tolist()] == e["targets"][asked].tolist()
        for position, bin_ in zip(at, e["attr_distance"][asked], strict=True):
            distance = position - 2 * keys.index(e["inputs"][position])
            assert holds(task.attributes["distance"][bin_], distance)
        assert all(holds(task.attributes["pairs"][bin_], K) for bin_ in e["attr_pairs"])
        rest = np.delete(e["inputs"], [*range(2 * K), *at])
        assert rest.any() == fillers
    assert set(counts) == set(range(3, 17)), "the number of pairs takes every allowed value"
    pairs = sum(K * n for K, n in counts.items())
    assert task.baselines()["any value shown"] == pytest.approx(300 / pairs, rel=0.1)
    assert task.baselines()["chance"] == 1 / 128


def test_mqar_gaps_follow_the_power_law_without_replacement():
    alpha, n, space = 0.1, 6000, 6
    task = build("mqar", {"length": 16, "n_pairs": 2, "alpha": alpha, "vocab_size": 32})
    gaps = np.stack([(e["at"] - 4) // 2 for e in examples(task, "train", n)])
    p = np.array([alpha * i ** (alpha - 1) for i in range(1, space + 1)])
    p /= p.sum()
    second = [sum(p[i] * p[j] / (1 - p[i]) for i in range(space) if i != j) for j in range(space)]
    for column, law in zip(gaps.T, (p, np.array(second)), strict=True):
        share = np.bincount(column, minlength=space) / n
        assert np.abs((share - law) / np.sqrt(law * (1 - law) / n)).max() < 3.5


@pytest.mark.quick
@pytest.mark.parametrize("size", recall.SIZES)
def test_every_number_of_pairs_of_the_recall_config_can_be_asked(size):
    for pairs, length in recall.LENGTHS.items():
        section = configs.load(f"configs/recall.py:pairs={pairs},size={size}").data.mqar.to_dict()
        assert build("mqar", section).length == length
        assert section["vocab_size"] == recall.SIZES[size]["task"]["vocab_size"] or pairs == 64


# --- selective copying and induction ---


@pytest.mark.quick
def test_selective_copying_asks_for_the_tokens_in_order():
    L, V, Q = 40, 16, 5
    task = build("selective_copying", {"length": L, "n_tokens": Q, "vocab_size": V})
    places, tokens = Counter(), Counter()
    for e in examples(task, "train", 1600):
        noisy = e["inputs"][: L - Q]
        assert (noisy != 0).sum() == Q
        assert noisy[noisy != 0].tolist() == e["targets"].tolist()
        assert (e["inputs"][L - Q :] == V - 1).all() and e["at"].tolist() == list(range(L - Q, L))
        assert [task.attributes["place"][b] for b in e["attr_place"]] == ["1", "2", "3", "4", "5"]
        places.update(np.flatnonzero(noisy).tolist())
        tokens.update(e["targets"].tolist())
    assert set(places) == set(range(L - Q)) and max(places.values()) < 2 * min(places.values())
    assert set(tokens) == set(range(1, V - 1)) and max(tokens.values()) < 2 * min(tokens.values())
    assert task.baselines() == {"chance": 1 / 14}


@pytest.mark.quick
def test_induction_asks_for_the_token_after_the_trigger():
    L, V = 12, 8
    task = build("induction", {"length": L, "vocab_size": V})
    firsts, answers = Counter(), Counter()
    for e in examples(task, "train", 600):
        row = e["inputs"].tolist()
        assert row.count(V - 1) == 2 and row[-1] == V - 1
        first = row.index(V - 1)
        assert e["at"].tolist() == [L - 1] and e["targets"].tolist() == [row[first + 1]]
        assert holds(task.attributes["distance"][e["attr_distance"][0]], L - 1 - first)
        firsts[first] += 1
        answers[row[first + 1]] += 1
    assert set(firsts) == set(range(L - 2)) and max(firsts.values()) < 2 * min(firsts.values())
    assert set(answers) == set(range(V - 1)) and max(answers.values()) < 2 * min(answers.values())
    assert task.baselines() == {"chance": 1 / 7}


# --- ListOps ---


def read_listops(words: list[str]) -> tuple[int, int, list[tuple[str, int]]]:
    """Value, levels, and (operator, number of arguments) of an expression, by a stack."""
    stack, seen = [["", []]], []
    deepest = 0
    for word in words:
        if word.startswith("["):
            stack.append([word, []])
        elif word == "]":
            operator, args = stack.pop()
            seen.append((operator, len(args)))
            solved = {"[MIN": min, "[MAX": max, "[MED": statistics.median, "[SM": lambda a: sum(a) % 10}
            stack[-1][1].append(int(solved[operator](args)))
        else:
            stack[-1][1].append(int(word))
        deepest = max(deepest, len(stack) - (word.startswith("[") or word == "]"))
    assert len(stack) == 1 and len(stack[0][1]) == 1, "one balanced expression"
    return stack[0][1][0], deepest, seen


@pytest.mark.parametrize("section", [SHORT_LISTOPS, {}])
def test_listops_values_by_a_stack(section):
    task = build("listops", section)
    operators = Counter()
    for e in examples(task, "train", 300 if section else 60):
        n = int(e["segments"].sum())
        assert (e["segments"][:n] == 1).all() and not e["inputs"][n:].any() and e["inputs"][:n].all()
        value, deepest, seen = read_listops([TOKENS[t] for t in e["inputs"][:n]])
        assert value == e["targets"]
        assert task.min_length < n < task.max_length and deepest <= task.max_depth
        assert all(2 <= args <= task.max_args for _, args in seen)
        assert holds(task.attributes["length"][e["attr_length"]], n)
        assert task.attributes["depth"][e["attr_depth"]] == str(deepest)
        operators.update(operator for operator, _ in seen)
    shares = np.array(list(operators.values())) / operators.total()
    assert len(operators) == 4 and np.abs(shares - 0.25).max() < 0.03


def test_listops_lengths_follow_the_exact_law():
    """Against the generating function G_d(z) = 3/4 z + 1/4 z^2 mean_a G_(d+1)(z)^a of the tokens."""
    depth, args, low, high, n = 4, 4, 6, 30, 6000
    law = np.zeros(high)
    law[1] = 1
    for _ in range(depth - 1):
        power, total = law, np.zeros(high)
        for _ in range(2, args + 1):
            power = np.convolve(power, law)[:high]
            total += power / (args - 1)
        law = 0.25 * np.concatenate([[0, 0], total])[:high]
        law[1] += 0.75
    law[: low + 1] = 0
    law /= law.sum()
    section = {"length": high, "max_depth": depth, "max_args": args, "min_length": low, "max_length": high}
    lengths = [int(e["segments"].sum()) for e in examples(build("listops", section), "train", n)]
    share = np.bincount(lengths, minlength=high) / n
    assert not share[law == 0].any()
    z = (share - law)[law > 0] / np.sqrt(law * (1 - law) / n)[law > 0]
    assert np.abs(z).max() < 3.5 and (z**2).mean() < 2


def test_listops_at_lra_parameters_has_the_known_statistics():
    """Figures from 20,000 trees of an independent generator of the same law; here 3,000."""
    task = build("listops", {})
    drawn = examples(task, "train", 3000)
    lengths = [int(e["segments"].sum()) for e in drawn]
    known = np.array([539, 701, 953, 1309, 1804])
    assert np.abs(np.percentile(lengths, [5, 25, 50, 75, 95]) / known - 1).max() < 0.04
    labels = np.bincount([int(e["targets"]) for e in drawn], minlength=10) / 3000
    assert labels[[0, 9]] == pytest.approx([0.168, 0.170], abs=0.02)
    assert labels[1:9].min() > 0.073 - 0.015 and labels[1:9].max() < 0.093 + 0.015
    assert np.mean([e["attr_depth"] == 8 for e in drawn]) > 0.99
    assert task.baselines() == pytest.approx({"majority": 0.1696, "root operator": 0.363}, abs=0.01)


def test_guesses_at_listops_are_tried_on_trees_that_they_were_not_taken_from():
    known = np.array([[0, 0, 0, 1, 1, 3], [1, 1, 2, 9, 9, 9]])  # root operators and values
    asked = np.array([[0, 0, 1, 1, 3], [1, 2, 9, 8, 9]])
    assert guessed(known, known) == {"majority": 3 / 6, "root operator": 5 / 6}
    assert guessed(known, asked) == {"majority": 2 / 5, "root operator": 3 / 5}
    assert sampled(build("listops", {})) == pytest.approx(KNOWN, abs=0.03)


# --- text ---


def text_of(task: Task, split: str) -> bytes:
    """The bytes an evaluation split's windows show, in order."""
    windows = examples(task, split, task.size(split))
    for e in windows:
        assert e["inputs"][1:].tolist() == e["targets"][:-1].tolist()
    return bytes(np.concatenate([windows[0]["inputs"][:1], *(e["targets"] for e in windows)]).tolist())


@pytest.mark.quick
def test_text_round_trip_and_disjoint_splits(book):
    whole = book.read_bytes()
    task = build("text", {"path": str(book), "length": 16, "validation": 0.1, "test": 0.2})
    train, validation, test = text_of(task, "train"), text_of(task, "validation"), text_of(task, "test")
    assert whole[:2100].startswith(train) and len(train) == 130 * 16 + 1
    assert whole[2100:2400].startswith(validation) and len(validation) == 18 * 16 + 1
    assert whole[2400:].startswith(test) and len(test) == 37 * 16 + 1
    e = examples(task, "test", 1)[0]
    labels = [task.attributes["position"][b] for b in e["attr_position"]]
    assert labels == ["1", *["2-3"] * 2, *["4-7"] * 4, *["8-15"] * 8, "16-31"]
    commonest = Counter(whole).most_common(1)[0][1] / 3000
    assert task.baselines() == {"chance": 1 / 256, "commonest byte": pytest.approx(commonest)}


@pytest.mark.quick
def test_text_epochs_cut_the_windows_at_other_phases_and_stay_in_the_training_split(tmp_path):
    L, n_train = 8, 256
    path = tmp_path / "counting"
    path.write_bytes(bytes(range(256)) + bytes(64))  # in the training split a byte is its own position
    task = build("text", {"path": str(path), "length": L, "validation": 0.1, "test": 0.1})
    n = task.size("train")
    phases = []
    for epoch in range(L):
        starts = sorted(batch_at(task, 0, "train", n, epoch)["inputs"][:, 0].tolist())
        assert starts == list(range(starts[0], starts[0] + n * L, L))
        assert starts[0] < L and starts[-1] + L + 1 <= n_train
        phases.append(starts[0])
    assert phases[0] == 0 and len(set(phases)) > L // 2


@pytest.mark.quick
def test_a_folder_is_its_sorted_visible_files_with_a_zero_byte_between(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {"a.txt": 70, "b/a.txt": 1, "b/c.txt": 90, "z": 45, "empty": 0, ".hidden": 50, ".git/x": 50}
    for k, (name, n) in enumerate(files.items()):
        (tmp_path / name).write_bytes(bytes([ord("A") + k]) * n)
    task = build("text", {"path": str(tmp_path), "length": 4, "validation": 0.3, "test": 0.3})
    whole = b"A" * 70 + b"\0B\0" + b"C" * 90 + b"\0" + b"D" * 45
    assert task.corpus.size == len(whole)
    assert b"".join(chunk.tobytes() for chunk in task.corpus.chunks(7)) == whole
    for start, n in itertools.product(range(len(whole) - 5), (1, 5)):
        assert task.corpus.read(start, n).tobytes() == whole[start : start + n]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("n", "says"),
    [
        (None, r"does not exist; length 16 needs a text of at least 331 bytes"),
        (0, r"is empty; length 16 needs a text of at least 331 bytes"),
        (330, r"has only 330 bytes; length 16 needs a text of at least 331 bytes"),
    ],
)
def test_a_text_that_cannot_serve_says_what_is_needed(tmp_path, n, says):
    path = tmp_path / "book.txt"
    if n is not None:
        path.write_bytes(b"x" * n)
    with pytest.raises(UserError, match=says) as error:
        build("text", {"path": str(path), "length": 16})
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    path.write_bytes(b"x" * 331)
    task = build("text", {"path": str(path), "length": 16})
    assert all(task.size(split) >= 1 for split in SPLITS)
    with pytest.raises(UserError, match=r"data.text.path is not set; give a text file or a folder"):
        build("text", {})


@pytest.mark.quick
def test_the_fingerprint_of_a_text_is_that_of_its_bytes_wherever_they_lie(tmp_path, book):
    whole = bytearray(book.read_bytes())
    copy, changed = tmp_path / "copy", tmp_path / "changed"
    copy.write_bytes(whole)
    whole[1234] ^= 1  # in no example that the fingerprint looks at
    changed.write_bytes(whole)
    prints = [build("text", {"path": str(p), "length": 16}).fingerprint(0) for p in (book, copy, changed)]
    assert prints[0] == prints[1] != prints[2]


# --- labels ---


@pytest.mark.quick
def test_running_sum_labels_every_token_with_the_sum_so_far():
    task = build("running_sum", {"length": 9, "modulus": 3})
    labels = Counter()
    for e in examples(task, "train", 900):
        total = 0
        for token, label, place, bin_ in zip(e["inputs"], e["targets"], range(1, 10), e["attr_position"], strict=True):
            total = total + 1 if token == 1 else total + 2 if token == 2 else total
            while total >= 3:
                total -= 3
            assert label == total and holds(task.attributes["position"][bin_], place)
            labels[place, int(label)] += 1
    assert len(labels) == 27 and max(labels.values()) < 1.4 * min(labels.values()), "labels are alike at every token"
    assert task.baselines() == {"chance": 1 / 3}
