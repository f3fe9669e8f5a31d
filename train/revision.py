"""Which code is running: the git commit, marked if files differ from it."""

import hashlib
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parent.parent
ROOMS = ("configs", "data", "eval", "model", "train")


def revision() -> str:
    """A short commit hash, `+` appended when the tree has changes.

    LONGVIEW_REVISION says it for code that was brought somewhere else, as into a container; else there it is `unknown`.
    """
    if "LONGVIEW_REVISION" in os.environ:
        return os.environ["LONGVIEW_REVISION"]

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def source_digest() -> str:
    """A short hash of the code itself: edited files count, and none of git's are needed."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
