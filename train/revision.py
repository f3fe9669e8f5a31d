"""Which code is running: the git commit, marked if files differ from it."""

import os
import pathlib
import subprocess


def revision() -> str:
    """A short commit hash, `+` appended when the tree has changes.

    LONGVIEW_REVISION says it for code that was brought somewhere else, as into a container; else there it is `unknown`.
    """
    if "LONGVIEW_REVISION" in os.environ:
        return os.environ["LONGVIEW_REVISION"]
    root = pathlib.Path(__file__).parent.parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")
