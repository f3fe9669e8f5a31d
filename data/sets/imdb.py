"""The Large Movie Review Dataset (Maas et al., 2011, https://ai.stanford.edu/~amaas/data/sentiment/).

Reviews stand in the order of their own SHA-256, so that nothing depends on the names of files or their order in an
archive, and any part of them is a fair sample. SHA-256 of the archive: TensorFlow Datasets,
url_checksums/imdb_reviews.txt. The arrays' are of a copy whose reviews have as many bytes as the release's, by the size
that Hugging Face's card of the set states.
"""

import hashlib

import numpy as np

from data.prepared import Writer
from data.sets.reading import Files
from data.sets.release import Download, Release
from data.sets.tables import Texts
from model.errors import UserError

LABELS = {"neg": 0, "pos": 1}
LARGEST = 1 << 20  # bytes of one review


def convert(files: Files, writer: Writer) -> None:
    reviews = {"train": [], "test": []}
    for match, entry in files.matching(r"(train|test)/(neg|pos)/[^/]+\.txt"):
        text = entry.read(LARGEST)
        reviews[match[1]].append((hashlib.sha256(text).digest(), LABELS[match[2]], text))
    for split, found in reviews.items():
        if not found:
            raise UserError(f"{files.where} has no {split}/pos/*.txt and {split}/neg/*.txt")
        found.sort()
        texts = Texts(writer, f"{split}_text", f"{split}_starts")
        for _, _, text in found:
            texts.append(text)
        texts.finish()
        writer.append(f"{split}_labels", np.array([label for _, label, _ in found], np.uint8))


IMDB = Release(
    "imdb",
    "Reviews of films, 25,000 and 25,000, half of them kind.",
    (
        Download(
            "aclImdb_v1.tar.gz",
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            ("aclImdb",),
            84125825,
            "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
        ),
    ),
    convert,
    {
        "test_labels": "9f3fa540ded685a8286d727c290f0c93b46dc5c4f3b51fea3174aaf145974ede",
        "test_starts": "b319a6777a26517b7678cdc87a035ac0599f54df5469a678cc688ca553342dd3",
        "test_text": "a9535c8bf7e314ca74ed7eb117d0fc3ac5ebf4ba47caf45aca450a455db0a799",
        "train_labels": "27041df769122f886fbc9bf7a0955374f94cae3388279ba481df0e1c654a214d",
        "train_starts": "ccf17a769094ccd2b30cc9a35003f33ba50f85772ea7064a5b61c73c037d687f",
        "train_text": "f08a9c5abbb1c03deed1f9066f46192e17459e13e7faeda8d3d9110a9649276d",
    },
)
