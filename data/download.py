"""A file from its address, taken up where an earlier attempt ended, and named only once it is what was promised."""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from data.prepared import folders
from data.progress import Bytes
from data.sets.release import Download
from model.errors import UserError

PIECE = 1 << 18
PATIENCE = 30  # seconds without a byte
ABSENT = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


def download(one: Download, root: Path) -> Path:
    """What is below the root of it already, or the file, fetched."""
    if (there := one.found(root)) is not None:
        return there
    path = root / one.path
    part = path.with_name(path.name + ".part")
    with contextlib.ExitStack() as made:
        try:
            made.enter_context(folders(path.parent))
            with open(part, "ab"):  # a folder that cannot be written is said before the network is asked
                made.callback(_drop_empty, part)
        except OSError as error:
            raise UserError(f"cannot write {part}: {error.strerror}") from None
        try:
            _fetch(one, part)
        except ABSENT as error:
            why = getattr(error, "reason", None) or error
            raise UserError(f"cannot fetch {one.url} ({why}); put that file at {path} and prepare again") from None
        _verify(one, part)
        os.replace(part, path)
    return path


def _drop_empty(part: Path) -> None:
    if part.exists() and not part.stat().st_size:
        part.unlink()


def _fetch(one: Download, part: Path) -> None:
    """Appends what is missing; a server that will not begin in the middle begins anew."""
    have = part.stat().st_size
    if one.size is not None and have >= one.size:
        return
    request = urllib.request.Request(one.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing comes after what is here
            return
        raise
    with answer, open(part, "r+b") as file:
        if answer.status != 206:
            have = 0
            file.truncate()
        file.seek(have)
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else one.size
        with Bytes(f"fetching {part.stem}", total, have) as bar:
            while piece := answer.read(PIECE):
                file.write(piece)
                bar(len(piece))
    got = part.stat().st_size
    if total is not None and got < total:
        raise ConnectionError(f"it ended after {got:,} of {total:,} bytes; what came is kept and gone on from")


def _verify(one: Download, part: Path) -> None:
    got = part.stat().st_size
    with open(part, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (one.size is not None and got != one.size) or (one.sha256 is not None and digest != one.sha256):
        part.unlink()
        raise UserError(
            f"{one.url} has {got:,} bytes of SHA-256 {digest}, not {one.size:,} of {one.sha256}; it was thrown away"
        )
