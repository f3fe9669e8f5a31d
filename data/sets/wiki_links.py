"""Pairs of Wikipedia articles of enwik8, and whether one links to the other: a stand-in for Retrieval, and no AAN.

An article is a page that is none of a namespace, no redirect and whole. Links, with their words, are taken out of
all texts, those to categories, pictures and other languages too; an article counts if 4,000 bytes or more are left,
and 4,000 characters of it are kept. Pairs are first and second: the first links to the second, by its title or by that
of a redirect. Of two articles that link to each other one is the first, by the parity of their numbers.

All pairs of one first article are in one split: articles are permuted, and the first 80 % of them are firsts for
training, then 10 % to validate and 10 % to test. There are as many pairs without a link: in each split the firsts and
the seconds are the same, as often, only who is with whom is permuted, so neither text alone tells anything. No two
articles are a pair twice, in whatever order and split.
"""

import re
from collections.abc import Iterator

import numpy as np

from data.prepared import Writer
from data.rng import Stream
from data.sets.enwik8 import ENWIK8
from data.sets.reading import Files
from data.sets.release import Release
from model.errors import UserError

SHORTEST = 4000  # bytes of a text without its links
KEPT = 16_000  # bytes: 4,000 characters take at most as many
LARGEST = 1 << 30
NAMESPACES = (
    b"Media Special Talk User User_talk Wikipedia Wikipedia_talk Image Image_talk MediaWiki MediaWiki_talk Template "
    b"Template_talk Help Help_talk Category Category_talk Portal Portal_talk"
).split()
PAGE = re.compile(rb"<page>\s*<title>([^<]*)</title>.*?<text[^>]*>([^<]*)</text>\s*</revision>\s*</page>", re.DOTALL)
REDIRECT = re.compile(rb"\s*#redirect:?\s*\[\[([^\]|#]+)", re.IGNORECASE)
LINK = re.compile(rb"\[\[([^\[\]|#]+)[^\[\]]*\]\]")
INNERMOST = re.compile(rb"\[\[[^\[\]]*\]\]")
SPLITS = {"train": 8, "validation": 1, "test": 1}  # tenths of the firsts


def plain(text: bytes) -> bytes:
    """Without the four escapes of the dump; `&` last, so that none is undone twice."""
    for escape, byte in ((b"&lt;", b"<"), (b"&gt;", b">"), (b"&quot;", b'"'), (b"&amp;", b"&")):
        text = text.replace(escape, byte)
    return text


def title(name: bytes) -> bytes:
    """A page's name as links mean it: blanks as one underscore, the first letter large."""
    name = b"_".join(name.replace(b"_", b" ").split())
    return name[:1].upper() + name[1:]


def pages(dump: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Names and texts of the whole pages that are of no namespace."""
    for match in PAGE.finditer(dump):
        name = title(plain(match[1]))
        if name.partition(b":")[0] not in NAMESPACES:
            yield name, plain(match[2])


def unlinked(text: bytes) -> bytes:
    """A text without its links; those inside the caption of a picture go first."""
    before = None
    while text != before:
        before, text = text, INNERMOST.sub(b"", text)
    return text


def cut(text: bytes) -> bytes:
    """At most KEPT bytes, of whole characters."""
    return text[:KEPT].decode("utf-8", "ignore").encode()


def articles(dump: bytes) -> tuple[list[bytes], np.ndarray]:
    """Texts of the articles that count, and who links to whom: [n, 2], sorted, each two once."""
    aliases, texts, targets = {}, {}, {}
    for name, text in pages(dump):
        if redirect := REDIRECT.match(text):
            aliases[name] = title(redirect[1])
            continue
        left = unlinked(text)
        if len(left) >= SHORTEST:
            texts[name] = cut(left)
            targets[name] = {title(target) for target in LINK.findall(text)}
    number = {name: i for i, name in enumerate(texts)}
    found = set()
    for name, i in number.items():
        reached = {number.get(target, number.get(aliases.get(target))) for target in targets[name]} - {None, i}
        found |= {(i, j) for j in reached}
    once = [(i, j) for i, j in found if (j, i) not in found or (i < j) == ((i + j) % 2 == 0)]
    return list(texts.values()), np.array(sorted(once), np.int64).reshape(-1, 2)


def strangers(pairs: np.ndarray, seen: set[tuple[int, int]], rng: np.random.Generator) -> np.ndarray:
    """The same firsts and the same seconds, each as often, in pairs [n, 2] that are not in `seen`, to which they go."""
    first, second = pairs[:, 0], rng.permutation(pairs[:, 1])
    left = np.arange(len(pairs))
    for _ in range(100):
        again = []
        for i in left.tolist():
            key = tuple(sorted((int(first[i]), int(second[i]))))
            if key[0] == key[1] or key in seen:
                again.append(i)
            else:
                seen.add(key)
        if not again:
            return np.stack([first, second], axis=1)
        # Those that failed change seconds with as many that did not, which must then be tried again too.
        kept = np.setdiff1d(np.arange(len(pairs)), again)
        others = rng.permutation(kept)[: len(again)]
        seen -= {tuple(sorted((int(first[i]), int(second[i])))) for i in others}
        left = np.concatenate([np.array(again), others])
        second[left] = rng.permutation(second[left])
    raise UserError(f"{len(pairs):,} links leave no pairs of articles without one; a larger part of enwik8 is needed")


def convert(files: Files, writer: Writer) -> None:
    dump = next((entry.read(LARGEST) for _, entry in files.matching("enwik8")), None)
    if dump is None:
        raise UserError(f"enwik8 is not in {files.where}")
    texts, links = articles(dump)
    if not len(links):
        raise UserError(f"{files.where} has no two articles of {SHORTEST:,} bytes of which one links to the other")
    writer.append("text", np.frombuffer(b"".join(texts), np.uint8))
    writer.append("starts", np.cumsum([0, *map(len, texts)], dtype=np.int64))
    writer.note(f"{len(texts):,} articles, {len(links):,} links among them")

    rng = Stream(0, "wiki_links").at(0)
    tenth = rng.permutation(len(texts)) * 10 // len(texts)
    seen, begin = {tuple(sorted(pair)) for pair in links.tolist()}, 0
    for split, tenths in SPLITS.items():
        mine = links[(tenth[links[:, 0]] >= begin) & (tenth[links[:, 0]] < begin + tenths)]
        pairs = np.concatenate([mine, strangers(mine, seen, rng)])
        order = rng.permutation(len(pairs))
        writer.append(f"{split}_pairs", pairs[order].astype(np.int32))
        writer.append(f"{split}_labels", (order < len(mine)).astype(np.uint8))
        begin += tenths


WIKI_LINKS = Release(
    "wiki_links",
    "Pairs of Wikipedia articles of enwik8, half of which link to each other.",
    ENWIK8.downloads,
    convert,
    {
        "starts": "98fa480009cf9d0912974dacdc580b0ca60b2f289fed68185fb3ec35e86f74f2",
        "test_labels": "640dd05878bd0a9f648b82d268aa97871a437db665aa21412ea601f852dd4912",
        "test_pairs": "2bd57517f2ab92eddad72c65f2a856c00d7aeeb20ba8696afcc0df15eb7578ee",
        "text": "7a35c9d432fa3432c877d2e7a9c2fbca36bd663d2b8c4ecd51f5d55dfbd3a6a5",
        "train_labels": "f49c3b33eb90dbc22b7e42f017bde615a507b1095d1231b0eecbe5cef4bb9279",
        "train_pairs": "fe5d13c4a4d4dfebb80b47bc9021790c2ad520fe5e6536d40b94c59a62a693a0",
        "validation_labels": "0316395d145f569ba08bae5bf7f3b6103b996a37ef40dcc0eef0ef672e5f8df3",
        "validation_pairs": "aa04c45bea4b587a2a4ac96ecaa9a1a2905ae7d6b6009d920030665073ddb654",
    },
)
