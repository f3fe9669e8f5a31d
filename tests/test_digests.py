"""The same index makes the same bytes on every platform: the SHA-256 of each generator's first 1,000 examples."""

import hashlib

import numpy as np
import pytest

from data import build
from data.pipeline import gather

# Task -> (its section, the digest of its training split with seed 0).
DIGESTS = {
    "common_words": ({}, "c53f04da17ae5dcb291d16db9c3d28e788c5f6a7b3413ccd9975986f1751429e"),
    "majority": ({}, "1021c0a3224e10cf84e6137342feaacf477b3cf392e0a4daef824652d7c964cb"),
    "multi_key": ({}, "d1240f6136e968d7584f74473f4cf4db140c355b69aa7826910f075d4af3a29c"),
    "multi_query": ({}, "f7dc3734443f19769b9ff019ef3edab4177735e6f84918290c8526ccdcb420ba"),
    "multi_value": ({}, "12657db2b54c1305a3e5a7748bdb1986dc4c8efcf80d30d4b5498254d8dfa0bd"),
    "needle": ({}, "0803058948d2b06037584289eea6f0c7e80bafee90f5b1cd14e33026f11085c6"),
    "passkey": ({}, "070f96846a5605a5d98460eb0a4abf05bbc65face4fb124ed3e2d156e578b342"),
    "variable_tracking": ({"n_chains": 2}, "3616f7d995bc74fd8b8c09565bfe72dcee24775621571e682611a2886f662971"),
}


def digest(name: str, section: dict) -> str:
    """Over all keys of the first 1,000 examples, or of all there are: name, dtype, shape and bytes."""
    task = build(name, section)
    index = np.arange(min(1000, task.size("train") or 1000))
    h = hashlib.sha256()
    for key, array in sorted(gather(task, 0, "train", 0, index, index).items()):
        h.update(f"{key}/{array.dtype}/{array.shape}".encode() + array.tobytes())
    return h.hexdigest()


@pytest.mark.quick
@pytest.mark.parametrize("name", DIGESTS)
def test_first_examples_are_the_known_bytes(name):
    section, known = DIGESTS[name]
    assert digest(name, section) == known
