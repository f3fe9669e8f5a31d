"""Retrieval: documents as both protocols have them, and pairs of articles that only reading both can tell."""

import numpy as np
import pytest

from data import build
from data.pipeline import batch_at
from data.prepare import prepare
from data.prepared import open_set
from data.sets import wiki_links
from data.sets.wiki_links import articles, plain, strangers, title, unlinked
from model.errors import UserError
from tests import sets
from tests.sets import refused, small
from tests.stores import articles as small_articles
from tests.test_data import examples

pytestmark = pytest.mark.quick


# --- protocols ---


@pytest.fixture
def papers(tmp_path):
    files = {}
    for split in ("train", "eval", "test"):
        rows = f"1.0\t7\t8\tcaf\u00e9 ~\t{split} and much more\n0.0\t1\t2\t\tx\n"
        files[f"tsv_data/new_aan_pairs.{split}.tsv"] = rows.encode()
    sets.put(tmp_path, files)
    prepare(small("lra_aan"), tmp_path)
    return str(tmp_path)


def test_lra_reads_bytes_plus_one(papers):
    task = build("aan", {"root": papers, "length": 10})
    assert task.vocab_size == 257 and task.asked.pair and task.sizes() == {"train": 2, "validation": 2, "test": 2}
    pair, empty = examples(task, "validation", 2)
    assert pair["inputs"].tolist() == [1 + byte for byte in "caf\u00e9 ~".encode()] + [0, 0, 0]
    assert pair["segments"].tolist() == [1] * 7 + [0] * 3
    assert pair["other"].tolist() == [1 + byte for byte in b"eval and m"], "cut at the length"
    assert pair["other_segments"].tolist() == [1] * 10
    assert (pair["targets"], empty["targets"]) == (1, 0)
    assert not empty["segments"].any() and empty["other_segments"].sum() == 1
    assert task.attributes["length"][pair["attr_length"]] == "8-15"


def test_s4_reads_characters_with_an_end(papers):
    task = build("aan", {"root": papers, "length": 10, "protocol": "s4"})
    assert task.vocab_size == 98
    pair, empty = examples(task, "test", 2)
    ids = {c: ord(c) - 32 + 3 for c in map(chr, range(32, 127))}
    assert pair["inputs"].tolist() == [ids["c"], ids["a"], ids["f"], 1, ids[" "], ids["~"], 2, 0, 0, 0]
    assert pair["other"].tolist() == [ids[c] for c in "test and "] + [2], "room is left for the end"
    assert empty["inputs"].tolist() == [2] + [0] * 9 and empty["segments"].sum() == 1


def test_a_batch_is_of_the_pairs_asked_for(tmp_path):
    arrays = small_articles(25)
    sets.ready(tmp_path, "wiki_links", **arrays)
    task = build("wiki_links", {"root": str(tmp_path), "length": 40})
    batch = batch_at(task, 0, "test", 8, 1)
    for row, place in enumerate(range(8, 16)):
        for key, article in zip(("inputs", "other"), arrays["test_pairs"][place], strict=True):
            begin, end = arrays["starts"][article : article + 2]
            text = arrays["text"][begin:end][:40]
            assert np.array_equal(batch[key][row, : text.size], text + 1) and not batch[key][row, text.size :].any()
        assert batch["targets"][row] == arrays["test_labels"][place]
    assert task.baselines() == {"chance": 0.5, "majority": 13 / 25}


def test_a_set_that_is_not_there_names_the_command(tmp_path):
    with pytest.raises(UserError, match=f"python -m data.prepare wiki_links --root={tmp_path}"):
        build("wiki_links", {"root": str(tmp_path)})


# --- articles ---


def page(name: str, text: str) -> str:
    return (
        f"  <page>\n    <title>{name}</title>\n    <id>1</id>\n    <revision>\n      <id>2</id>\n"
        f"      <comment>a &lt;text&gt; of it</comment>\n"
        f'      <text xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
    )


LONG = "word " * 900


def test_links_are_found_by_title_or_redirect_and_taken_out():
    dump = "".join(
        [
            page(
                "Apple pie",
                f"The [[Pear tart|other one]] and [[pear_tart#Crust]], [[Apple pie]] &amp;amp; [[Tart]]. {LONG}",
            ),
            page(
                "Pear tart",
                f"See [[Image:x.jpg|thumb|of [[Quince]]s]] [[Category:Food]] [[de:Birne]] [[Nothing]]. {LONG}",
            ),
            page("Tart", "#REDIRECT [[Quince jelly|x]]"),
            page("Quince", "#redirect: [[Quince jelly]]"),
            page("Quince jelly", LONG),
            page("Short", "[[Apple pie]] " + "word " * 700),
            page("Talk:Apple pie", f"[[Quince]] {LONG}"),
        ]
    )
    dump += page("Cut", LONG)[:-40]  # as the file ends
    texts, links = articles(dump.encode())
    assert [text[:30] for text in texts] == [
        b"The  and ,  &amp; . word word ",
        b"See    . word word word word w",
        LONG[:30].encode(),
    ]
    assert links.tolist() == [[0, 1], [0, 2], [1, 2]]


def test_of_two_that_link_to_each_other_one_is_first():
    texts, links = articles(
        "".join(page(f"P{i}", f"[[P{j}]] [[P{k}]] {LONG}") for i, j, k in ((0, 1, 2), (1, 0, 2), (2, 0, 1))).encode()
    )
    assert len(texts) == 3 and links.tolist() == [[0, 2], [1, 0], [2, 1]]


def test_names_and_escapes():
    assert title(b" new_york  City ") == b"New_york_City"
    assert plain(b"&lt;b&gt; &quot;x&quot; &amp;lt;") == b'<b> "x" &lt;'
    assert unlinked(b"a [[b|c [[d]] e]] f ]] [[g") == b"a  f ]] [[g"


def dump(n: int, degree: int) -> bytes:
    """n articles, each with links to the next `degree`."""
    return "".join(
        page(f"P{i}", " ".join(f"[[P{(i + j) % n}]]" for j in range(1, degree + 1)) + f" {i} {LONG}") for i in range(n)
    ).encode()


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    root = tmp_path_factory.mktemp("linked")
    sets.put(root, {"enwik8": dump(100, 4)})
    prepare(small("wiki_links"), root)
    return open_set(str(root), "wiki_links")


SPLITS = ("train", "validation", "test")


def test_half_of_the_pairs_are_links_and_no_two_are_a_pair_twice(linked):
    pairs = {split: linked.arrays[f"{split}_pairs"] for split in SPLITS}
    links = {frozenset((i, (i + j) % 100)) for i in range(100) for j in range(1, 5)}
    for split, label in ((split, linked.arrays[f"{split}_labels"]) for split in SPLITS):
        assert label.sum() * 2 == len(label) > 0
        assert [frozenset(pair) in links for pair in pairs[split].tolist()] == label.astype(bool).tolist()
    every = [frozenset(pair) for split in SPLITS for pair in pairs[split].tolist()]
    assert len(set(every)) == len(every) == 800
    assert linked.notes == ("100 articles, 400 links among them",)


def test_neither_document_alone_tells_the_label(linked):
    for split in SPLITS:
        pairs, label = linked.arrays[f"{split}_pairs"], linked.arrays[f"{split}_labels"] == 1
        for side in range(2):
            assert np.array_equal(np.sort(pairs[label, side]), np.sort(pairs[~label, side]))
    assert 0.3 < (linked.arrays["train_labels"][:100]).mean() < 0.7, "in no order"


def test_all_pairs_of_a_first_article_are_in_one_split(linked):
    firsts = [set(linked.arrays[f"{split}_pairs"][:, 0].tolist()) for split in SPLITS]
    assert [len(first) for first in firsts] == [80, 10, 10] and len(set.union(*firsts)) == 100


def test_an_article_is_cut_at_a_whole_character(tmp_path):
    euros = 9000 * "\u20ac"  # of three bytes
    sets.put(tmp_path, {"enwik8": (page("P0", f"[[P1]]{euros}") + page("P1", f"x[[P0]]{euros}")).encode()})
    with pytest.raises(UserError, match="1 links leave no pairs"):
        prepare(small("wiki_links"), tmp_path)
    texts, _ = articles((tmp_path / "enwik8").read_bytes())
    assert [len(text) for text in texts] == [15_999, 16_000] and texts[1].decode() == "x" + euros[:5333]


def test_a_file_without_articles_is_refused(tmp_path):
    sets.put(tmp_path, {"enwik8": b"<page> of nothing"})
    assert "has no two articles" in refused(small("wiki_links"), tmp_path)
    assert wiki_links.WIKI_LINKS.sha256.keys() == {
        "text",
        "starts",
        *(f"{split}_{what}" for split in SPLITS for what in ("pairs", "labels")),
    }


def test_strangers_leave_what_was_seen_and_keep_all_that_there_is():
    rng = np.random.default_rng(0)
    pairs = np.stack([np.arange(30) % 10, 10 + np.arange(30) % 30], axis=1)
    seen = {tuple(sorted(pair)) for pair in pairs.tolist()}
    known = set(seen)
    with pytest.raises(UserError, match="leave no pairs"):
        strangers(np.repeat(pairs[:1], 3, axis=0), set(known), rng)
    found = strangers(pairs, seen, rng)
    assert not {tuple(sorted(pair)) for pair in found.tolist()} & known
    assert len({tuple(pair) for pair in found.tolist()}) == 30 and len(seen) == 60
    assert all(np.array_equal(np.sort(found[:, side]), np.sort(pairs[:, side])) for side in range(2))
