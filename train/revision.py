"""Which code is running: the git commit, marked if files differ from it."""

import os
import pathlib
import subprocess


def revision() -> str:
    """A short commit hash, `+` appended when the tree has changes.

    Outside a checkout, as in a container, it is what LONGVIEW_REVISION says, or `unknown`.
    """
    root = pathlib.Path(__file__).parent.parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True).stdout

    try:
        commit = git("rev-parse", "--short=12", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LONGVIEW_REVISION", "unknown")
    return commit + ("+" if changed else "")
