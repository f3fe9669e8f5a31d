"""The same index makes the same bytes on every platform: the SHA-256 of each generator's first 1,000 examples."""

import hashlib

import numpy as np
import pytest

from data import TASKS, build
from data.pipeline import gather
from data.stored import Stored
from data.text import Text

SMALL_MIX = {"length": 64, "vocab_size": 128, "train": ((16, 2, 500), (64, 10, 500)), "test": ((16, 4),)}

# Task -> (its section, the digest of its training split with seed 0).
DIGESTS = {
    "adding": ({}, "07b24cbc8b15222d6838918de03a7c7e77cf70ee89f0906f6bf14f247fbba3d8"),
    "common_words": ({}, "c53f04da17ae5dcb291d16db9c3d28e788c5f6a7b3413ccd9975986f1751429e"),
    "copy": ({}, "ab966345a86705ca43889c986af6177b71c7e172cff54510ac11bca993daf951"),
    "copying": ({}, "636d1003d00b37434c1eebb008333d172998be733abe8a6cca60a62164e533af"),
    "dates": ({}, "5ad3164eb37009e20f59945daabe3e0ef42c98e9273992df56249c8f2457eeea"),
    "delayed_recall": ({}, "2075879527507ed984dab9cee216f92daf7b83098b3b7ff477c1bf15b33c8b44"),
    "induction": ({}, "059f70eea6a1aae24e8bc5606232efc02cab1b8db10231b449d16828d5d65583"),
    "listops": ({}, "eb21437fb2357ad847ae22e431b10b0d673095778843c8d5b009fc20bb7680d8"),
    "lookup": ({}, "a8163f7b21302b9947e811d16a32cd161e63e5b8ec709f39ac31562ecbe662eb"),
    "mad_compression": ({}, "23e52901b71f003b0e14b7bad09062a968e1f62df3785764fc452d4bdc25179c"),
    "mad_fuzzy_recall": ({}, "245b4170f81ea54f156ceff2f9ab2671fabe75d7fa07ee08d754f8762cb87c20"),
    "mad_memorization": ({}, "81390eff08101f5b9d3a7e98f84f3427c904044baf8fc1313551bef7d3b8cf7f"),
    "mad_noisy_recall": ({}, "d1fcf73bd0df05b9fe209b6369e7a5df59c2561cd72c39e90b343151466181ea"),
    "mad_recall": ({}, "5bd4d1b8f268a47f7b555280459979ab27a0bd7f75a34d44b51fed9655a21500"),
    "mad_selective_copying": ({}, "3b9c4c2882f06722af29167ad174260a2f25092412e4f8519c9621d66a3f200c"),
    "majority": ({}, "1021c0a3224e10cf84e6137342feaacf477b3cf392e0a4daef824652d7c964cb"),
    "matching": ({}, "efcef03f9b8a72821c45ee3e1ee87ed7f77a2feda2371ee70855757fdd0289db"),
    "mqar": ({}, "0460466a3ae83a5c1e21eca9ce12d5dfb6ad367eaa105b2d02468400363cfeed"),
    "mqar_mix": (SMALL_MIX, "c9c0eea7ed224e57e1f3b1163a10e71b7f0f13b670688bdff487382eac06f852"),
    "multi_key": ({}, "d1240f6136e968d7584f74473f4cf4db140c355b69aa7826910f075d4af3a29c"),
    "multi_query": ({}, "f7dc3734443f19769b9ff019ef3edab4177735e6f84918290c8526ccdcb420ba"),
    "multi_value": ({}, "12657db2b54c1305a3e5a7748bdb1986dc4c8efcf80d30d4b5498254d8dfa0bd"),
    "needle": ({}, "0803058948d2b06037584289eea6f0c7e80bafee90f5b1cd14e33026f11085c6"),
    "noise": ({}, "48b8d020b2ba707485ed58e275715f35cf880982f6cf1f29655e457b4949808a"),
    "passkey": ({}, "070f96846a5605a5d98460eb0a4abf05bbc65face4fb124ed3e2d156e578b342"),
    "pathfinder": ({}, "747b3461b45a331e4228a6a415de0239e45f3f570a43677de91dce9a94d70ae5"),
    "permutations": ({}, "fd664c6b721e77a9ed9a93629af9becc2e0b2a71be161d91d35bddc043302f2f"),
    "reverse": ({}, "9f2921967a1ade228c42ff8f9eeaea79ebed248b4c423f5629bdcfafa365fd4c"),
    "running_sum": ({}, "29683d2cf9b92e061614b6fb62782030df87c31203fe38644637775fda10f0c1"),
    "selective_copying": ({}, "bf1567efd7ed1fac31e00bc8905b7240c2fc7068f100c547c21ae4edfdbe3d5c"),
    "shape_questions": ({}, "c255c83d069b3e08ca6c87f7dcf7195fe4bb7c61584eb897dcd8c65e7dd8eb3f"),
    "shapes": ({}, "a9f24bdd79201618a5e5e4285dd9682b5623e2c9c36d6dcb02ee1684c53d99ae"),
    "sort": ({}, "217173c1517b990249d6b3aa07bb36e54ccc0cb85a9ac74b8148e6a11da65712"),
    "translate": ({}, "0306f49f106e6b2927c173c48be49de8f1c0546ebe97c781de7fd39db4f63b82"),
    "variable_tracking": ({"n_chains": 2}, "3616f7d995bc74fd8b8c09565bfe72dcee24775621571e682611a2886f662971"),
}


# Side and difficulty of Pathfinder's images -> the same of the first four, which take longer to make. Of those of 128
# two have either margin.
LARGE_IMAGES = {
    (64, "easy"): "cc6e3bc96d731d6d38fff24e4333f2670c4d32fd3ed1be37d31234c80a6eff56",
    (64, "hard"): "40655af1565e43f437826bb909708f0c00a50ec83058a8c30afa8df6a6b1e04e",
    (128, "hard"): "95eb4e3a4a1768a8f7f777c7c34a33b2d98fdec21f7e149df218dc41f26c715b",
    (256, "hard"): "d73ae51b05a11d87822a358fb1d9fd2c8ae9aa89159bf8da5c5cf749a5159b17",
}


def digest(name: str, section: dict, most: int = 1000) -> str:
    """Over all keys of so many first examples, or of all there are: name, dtype, shape and bytes."""
    task = build(name, section)
    index = np.arange(min(most, task.size("train") or most))
    h = hashlib.sha256()
    for key, array in sorted(gather(task, 0, "train", 0, index, index).items()):
        h.update(f"{key}/{array.dtype}/{array.shape}".encode() + array.tobytes())
    return h.hexdigest()


def test_every_generator_is_here():
    read = {name for name, task in TASKS.items() if issubclass(task, Stored | Text)} - {"pathfinder", "listops"}
    assert DIGESTS.keys() == TASKS.keys() - read


@pytest.mark.quick
@pytest.mark.parametrize("name", DIGESTS)
def test_first_examples_are_the_known_bytes(name):
    section, known = DIGESTS[name]
    assert digest(name, section) == known


@pytest.mark.quick
@pytest.mark.parametrize(("side", "difficulty"), LARGE_IMAGES)
def test_first_large_images_are_the_known_bytes(side, difficulty):
    section = {"side": side, "difficulty": difficulty}
    assert digest("pathfinder", section, most=4) == LARGE_IMAGES[side, difficulty]
    if side == 64:
        fresh = section | {"n_train": 0}
        assert digest("pathfinder", fresh, most=4) == LARGE_IMAGES[side, difficulty], "of however many there are"
