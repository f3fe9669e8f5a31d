"""The first 10^8 bytes of Wikipedia as of 3 March 2006 (http://mattmahoney.net/dc/textdata.html)."""

import numpy as np

from data.prepared import Writer
from data.sets.reading import Files
from data.sets.release import Download, Release
from model.errors import UserError


def convert(files: Files, writer: Writer) -> None:
    for _, entry in files.matching("enwik8"):
        while piece := entry.stream.read(1 << 22):
            writer.append("bytes", np.frombuffer(piece, np.uint8))
        return
    raise UserError(f"enwik8 is not in {files.where}")


ENWIK8 = Release(
    "enwik8",
    "The first 100,000,000 bytes of Wikipedia.",
    (Download("enwik8.zip", "http://mattmahoney.net/dc/enwik8.zip", ("enwik8",)),),
    convert,
    {"bytes": "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"},
)
