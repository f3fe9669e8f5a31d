"""The data room: purity, hosts, restarts, and each task's law by a solver that shares no code with it."""

import dataclasses
import itertools
import statistics
from collections import Counter

import numpy as np
import pytest

from data import SPLITS, TASKS, Task, bins, build
from data.listops import TOKENS
from data.pipeline import batch_at, eval_batches, gather, stream
from data.rng import Stream, distinct
from model.errors import UserError

SHORT_LISTOPS = {"length": 100, "max_depth": 6, "min_length": 10, "max_length": 100}
SECTIONS = {
    "mqar": {"length": 32, "vocab_size": 64, "n_pairs": 6, "min_pairs": 2, "random_fillers": True},
    "selective_copying": {"length": 40, "n_tokens": 5},
    "induction": {"length": 20},
    "listops": SHORT_LISTOPS | {"n_train": 50, "n_validation": 21, "n_test": 10},
    "text": {"length": 16},
}


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_bytes(np.random.default_rng(1).integers(32, 127, 3000, dtype=np.uint8).tobytes())
    return path


@pytest.fixture(params=TASKS)
def task(request, book) -> Task:
    path = {"path": str(book)} if request.param == "text" else {}
    return build(request.param, SECTIONS[request.param] | path)


def examples(task: Task, split: str, n: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    made = gather(task, seed, split, 0, np.arange(n), np.arange(n))
    return [{key: array[i] for key, array in made.items()} for i in range(n)]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


def joined(parts: list[dict]) -> dict:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def holds(label: str, x: int) -> bool:
    """Whether a bin's label, "4-7" or "1", covers a number."""
    low, _, high = label.partition("-")
    return int(low) <= x <= int(high or low)


# --- every task ---


@pytest.mark.quick
def test_batches_are_pure(task):
    forward = [batch_at(task, 3, "train", 4, step) for step in range(4)]
    backward = [batch_at(task, 3, "train", 4, step) for step in reversed(range(4))][::-1]
    assert all(map(same, forward, backward))
    assert not same(forward[0], forward[1])
    if task.name != "text":
        assert not same(forward[0], batch_at(task, 4, "train", 4, 0)), "another seed makes other examples"


@pytest.mark.quick
@pytest.mark.parametrize("split", SPLITS)
def test_examples_keep_the_contract(task, split):
    B = 8
    batch = batch_at(task, 0, split, B, 0)
    assert batch["inputs"].shape == (B, task.length)
    assert 0 <= batch["inputs"].min() <= batch["inputs"].max() < task.vocab_size
    assert batch["weights"].dtype == np.float32
    assert all(a.dtype == np.int32 for key, a in batch.items() if key != "weights")
    if task.kind == "lm":
        assert batch["targets"].max() < task.vocab_size
        at = batch.get("at", batch["inputs"])
        assert at.shape == batch["targets"].shape == batch["weights"].shape
        assert "at" not in batch or 0 <= at.min() <= at.max() < task.length
    else:
        assert task.kind == "classify"
        assert batch["targets"].shape == batch["weights"].shape == (B,)
        assert batch["targets"].max() < task.n_classes
    assert {key for key in batch if key.startswith("attr_")} == {f"attr_{name}" for name in task.attributes}
    for name, labels in task.attributes.items():
        assert batch[f"attr_{name}"].shape == batch["targets"].shape
        assert 0 <= batch[f"attr_{name}"].min() <= batch[f"attr_{name}"].max() < len(labels)


@pytest.mark.quick
@pytest.mark.parametrize("split", ["train", "validation"])
def test_any_number_of_hosts_makes_the_same_batch(task, split):
    whole = batch_at(task, 0, split, 8, 2)
    for hosts in (2, 4):
        parts = [batch_at(task, 0, split, 8, 2, host, hosts) for host in range(hosts)]
        assert same(whole, joined(parts))


@pytest.mark.quick
def test_a_restarted_stream_is_the_tail_of_the_first(task):
    first = list(itertools.islice(stream(task, 0, 4), 9))
    again = list(itertools.islice(stream(task, 0, 4, start=5), 4))
    assert all(map(same, first[5:], again))
    assert all(same(first[step], batch_at(task, 0, "train", 4, step)) for step in range(9))
    rolled_back = next(stream(task, 0, 4, start=5, offset=3))
    assert same(rolled_back, first[8])


def test_splits_differ(task):
    seen = {s: {e["inputs"].tobytes() for e in examples(task, s, min(10, task.size(s) or 10))} for s in SPLITS}
    assert all(len(seen[s]) == min(10, task.size(s) or 10) for s in SPLITS)
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]


@pytest.mark.quick
def test_fingerprint_changes_with_anything_that_changes_the_data(task, monkeypatch):
    prints = {task.fingerprint(0), task.fingerprint(1)}
    assert task.fingerprint(0) in prints and len(prints) == 2
    changes = 2
    for field in dataclasses.fields(task):
        value = getattr(task, field.name)
        if field.name in ("path", "random_fillers"):
            continue
        if task.name == "listops":  # room for larger trees, smaller bounds
            step = {"length": 8, "min_length": -1, "max_length": -1}.get(field.name, 1)
        else:
            step = -0.01 if isinstance(value, float) and value > 0.01 else 0.5 if value == 0.01 else 2
        prints.add(dataclasses.replace(task, **{field.name: value + step}).fingerprint(0))
        changes += 1
    assert len(prints) == changes
    made = type(task).examples
    monkeypatch.setattr(type(task), "examples", lambda *args: made(*args) | {"targets": made(*args)["targets"] + 1})
    assert task.fingerprint(0) not in prints, "changed code shows"


def test_baselines_are_accuracies(task):
    assert task.baselines() and all(0 < value < 1 for value in task.baselines().values())


@pytest.mark.quick
def test_every_task_is_listed_under_its_name_with_one_line():
    for name, cls in TASKS.items():
        assert cls.name == name
        assert len(cls.__doc__.splitlines()[0]) < 110
        for field in dataclasses.fields(cls):
            assert isinstance(field.default, int | float | str | bool | tuple)


# --- the pipeline ---


def identities(batches: list[dict]) -> list[bytes]:
    return [row.tobytes() for batch in batches for row in batch["inputs"]]


@pytest.mark.quick
def test_epochs_are_different_permutations_of_a_finite_set():
    task = build("mqar", {"n_train": 10})
    rows = identities([batch_at(task, 0, "train", 4, step) for step in range(10)])  # batches straddle epochs
    epochs = [rows[e : e + 10] for e in range(0, 40, 10)]
    assert all(len(set(epoch)) == 10 and set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    other = identities([batch_at(task, 0, "train", 10, 0, order=1)])
    assert set(other) == set(epochs[0]) and other != epochs[0], "another order, the same examples"
    assert not set(identities([batch_at(task, 1, "train", 10, 0)])) & set(rows), "another seed, other examples"


@pytest.mark.quick
def test_order_draws_other_training_examples_but_the_same_validation():
    task = build("induction", {})
    assert not same(batch_at(task, 0, "train", 4, 0), batch_at(task, 0, "train", 4, 0, order=1))
    assert same(batch_at(task, 0, "test", 4, 0), batch_at(task, 0, "test", 4, 0, order=1))


@pytest.mark.parametrize("split", ["validation", "train"])
def test_evaluation_goes_once_through_a_finite_split_in_order(split):
    n = 21
    task = build("listops", SHORT_LISTOPS | {"n_train": n, "n_validation": n})
    halves = [list(eval_batches(task, 0, split, 8, 0, host, 2)) for host in range(2)]
    batches = [joined(list(parts)) for parts in zip(*halves, strict=True)]
    assert [batch["inputs"].shape for batch in batches] == [(8, 100)] * 3
    assert np.concatenate([batch["weights"] for batch in batches]).tolist() == [1] * n + [0] * 3
    assert identities(batches)[:n] == [e["inputs"].tobytes() for e in examples(task, split, n)]
    assert len(list(eval_batches(task, 0, split, 8, 2))) == 2
    assert len(list(eval_batches(task, 0, split, 8, 9))) == 3, "there is no more than the split"


@pytest.mark.quick
def test_evaluation_of_an_endless_split_needs_a_number_of_batches():
    task = build("induction", {})
    got = list(eval_batches(task, 0, "validation", 4, 3))
    assert len(got) == 3 and all(batch["weights"].all() for batch in got)
    with pytest.raises(UserError, match="endless validation split"):
        next(eval_batches(task, 0, "validation", 4, 0))


@pytest.mark.quick
def test_streams_of_numbers_restart_exactly_and_differ_by_every_part_of_the_address():
    random = Stream(0, "train")
    first = random.at(7).random(5)
    assert np.array_equal(random.at(7).random(5), first)
    words = random.at(7).integers(2**32, size=3, dtype=np.uint32)  # leaves half a word behind
    assert np.array_equal(random.at(7).integers(2**32, size=3, dtype=np.uint32), words)
    plain = np.random.Generator(np.random.Philox(key=random.key, counter=[0, 0, 7, 0]))
    assert np.array_equal(plain.random(5), first), "the stream is Philox at counter (0, 0, index, 0)"
    others = [Stream(1, "train").at(7), Stream(0, "test").at(7), Stream(0, "train", 1).at(7)]
    others.append(Stream(0, "train").at(8))
    assert all(not np.isin(other.random(5), first).any() for other in others)


@pytest.mark.quick
@pytest.mark.parametrize(("n", "k"), [(12, 3), (5, 4), (12, 6)])
def test_distinct_numbers_are_uniform(n, k):
    rng, trials = Stream(0, "train").at(0), 4000
    draws = distinct(rng, trials, n, k)
    assert all(len(set(row)) == k for row in draws.tolist())
    for column in draws.T:
        share = np.bincount(column, minlength=n) / trials
        assert np.abs(share - 1 / n).max() < 4 * np.sqrt(1 / n / trials)


@pytest.mark.quick
def test_power_of_two_bins():
    assert bins.labels(9) == ("1", "2-3", "4-7", "8-15")
    assert bins.number(np.array([1, 2, 3, 4, 7, 8, 2**30 - 1, 2**30])).tolist() == [0, 1, 1, 2, 2, 3, 29, 30]


# --- mistakes ---


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "section", "says"),
    [
        ("mqra", {}, "unknown task 'mqra'; choose from .*; closest: mqar"),
        ("mqar", {"lenght": 8}, "unknown field data.mqar.lenght; choose from length, .*; closest: length"),
        ("mqar", {"length": "64"}, "data.mqar.length is '64'; allowed: int"),
        ("mqar", {"random_fillers": 1}, "data.mqar.random_fillers is 1; allowed: bool"),
        ("mqar", {"length": 63}, "data.mqar.length is 63; allowed: even numbers; closest: 64"),
        (
            "mqar",
            {"n_pairs": 17},
            r"n_pairs is 17; allowed: 1 to 16 \(a quarter of length 64\); closest: 16",
        ),
        ("mqar", {"min_pairs": 5}, r"min_pairs is 5; allowed: 0 to 4 \(n_pairs\); closest: 4"),
        ("mqar", {"vocab_size": 9}, "vocab_size is 9; allowed: at least 10 .*; closest: 10"),
        ("mqar", {"alpha": 0.0}, "alpha is 0.0; allowed: at least 0.001"),
        ("mqar", {"n_train": -1}, "n_train is -1; allowed: at least 0"),
        ("selective_copying", {"n_tokens": 0}, "n_tokens is 0; allowed: 1 to 128 .*; closest: 1"),
        ("selective_copying", {"length": 30, "n_tokens": 16}, "allowed: 1 to 15 .*; closest: 15"),
        ("selective_copying", {"vocab_size": 2}, "vocab_size is 2; allowed: at least 3"),
        ("induction", {"length": 2}, "length is 2; allowed: at least 3"),
        ("induction", {"vocab_size": 2}, "vocab_size is 2; allowed: at least 3"),
        ("listops", {"length": 1998}, "length is 1998; allowed: at least 1999 .*; closest: 1999"),
        ("listops", {"max_length": 501}, "max_length is 501; allowed: at least 502"),
        ("listops", {"min_length": 0}, "min_length is 0; allowed: 1 to "),
        (
            "listops",
            {"max_depth": 3, "max_args": 3},
            "min_length is 500; allowed: 1 to 16 .*largest tree has 17",
        ),
        ("listops", {"n_test": 0}, "n_test is 0; allowed: at least 1"),
        ("text", {"length": 0}, "length is 0; allowed: at least 1"),
        ("text", {"test": 0.5}, "test is 0.5; allowed: 0.0001 to 0.4; closest: 0.4"),
    ],
)
def test_mistakes_are_told_in_one_line(name, section, says):
    with pytest.raises(UserError, match=says) as error:
        build(name, section)
    assert "\n" not in str(error.value)


@pytest.mark.quick
def test_a_whole_number_may_stand_for_a_float():
    assert build("mqar", {"alpha": 1}).alpha == 1


@pytest.mark.quick
def test_mistakes_in_the_pipeline():
    task = build("induction", {})
    with pytest.raises(UserError, match=r"unknown split 'valid'; choose from .*; closest: validation"):
        task.size("valid")
    with pytest.raises(UserError, match="batch_size is 6; allowed: multiples of 4 hosts; closest: 8"):
        batch_at(task, 0, "train", 6, 0, 0, 4)
    with pytest.raises(UserError, match="batch_size is 0"):
        batch_at(task, 0, "train", 0, 0)


def test_hopeless_listops_bounds_end_in_an_error(monkeypatch):
    monkeypatch.setattr("data.listops._TRIES", 50)
    task = build("listops", {"max_depth": 3, "min_length": 119, "max_length": 200, "length": 200})
    with pytest.raises(UserError, match=r"no tree of 119 < tokens < 200 in 50 tries; lower data.listops.min"):
        examples(task, "train", 1)


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
    baselines = task.baselines()
    assert baselines == pytest.approx({"majority": 0.1696, "root operator": 0.363}, abs=0.025)
    assert baselines == build("listops", {}).baselines()


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
