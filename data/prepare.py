"""Makes published sets ready for the tasks that read them: fetched or found, verified, and converted once.

    python -m data.prepare mnist cifar10 --root=downloads

What is below the root already, an archive as released or what it unpacks to, is not fetched. A set that is there whole
is left as it is; one that is damaged is made anew.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from data.download import download
from data.prepared import PreparedSet, Writer, folder, is_whole, open_set, writing
from data.progress import Bytes
from data.sets import SETS
from data.sets.reading import Files, whole
from data.sets.release import Release
from model.command import flag, run
from model.errors import UserError, choose
from model.settings import Name

ROOT = flag("root", Name, "downloads", "The folder with the official files, into which sets are written.")


def prepare(release: Release, root: Path) -> None:
    """Leaves the set whole below the root, or as it was and UserError."""
    with writing(root, release.name) as writer:
        paths = [download(one, root) for one in release.downloads]
        sizes = [path.stat().st_size if path.is_file() else None for path in paths]
        with Bytes(f"{release.name}: reading", None if None in sizes else sum(sizes) * release.passes) as bar:
            files = Files(tuple(paths), bar)
            with whole(files):
                release.convert(files, writer)
        verify(release, files, writer)


def verify(release: Release, files: Files, writer: Writer) -> None:
    """Refuses arrays that are not those of the release."""
    facts = writer.facts()
    for name, want in release.rows.items():
        got = facts[name]["shape"][0] if name in facts else 0
        if got != want:
            raise UserError(f"{files.where} gives {got:,} rows of {name}; the release has {want:,}")
    for name, want in release.listed.items():
        got = facts[name]["shape"][0] + writer.left_out[name]
        if got != want:
            raise UserError(f"{files.where} lists {got:,} rows of {name}; the release lists {want:,}")
    for name, want in release.sha256.items():
        got = facts[name]["sha256"]
        if got != want:
            raise UserError(f"wrong checksum: {name} of {files.where} has SHA-256 {got}; the release's has {want}")


def main(argv: Sequence[str]) -> int:
    names = argv[1:]
    if not names:
        raise UserError(f"no set is named; choose from {', '.join(sorted(SETS))}")
    releases = [choose("set", name, SETS) for name in names]
    root = Path(ROOT.value).expanduser()
    try:
        for release in releases:
            if is_whole(root, release.name):
                print(f"{release.name}: is there, and whole")
            else:
                prepare(release, root)
            tell(open_set(str(root), release.name), root)
    except KeyboardInterrupt:
        print("stopped; what was fetched is kept, and of a long conversion what was done", file=sys.stderr)
        return 130
    return 0


def tell(found: PreparedSet, root: Path) -> None:
    for line in found.notes:
        print(f"{found.name}: {line}")
    for name, array in found.arrays.items():
        print(f"{found.name}: {name} {array.dtype} {list(array.shape)}")
    print(f"{found.name}: {folder(root, found.name)}, digest {found.digest[:16]}")


if __name__ == "__main__":
    run(main)
