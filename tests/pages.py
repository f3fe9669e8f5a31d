"""What users read, in the order in which a newcomer would."""

from tests.processes import ROOT

NAMES = ("README.md", "SCALE.md", "data/README.md", "model/README.md", "experiments/README.md")
PAGES = tuple(ROOT / name for name in NAMES)


def between(mark: str, page: str) -> str:
    """What stands between `<!-- mark -->` and the next end."""
    (found,) = (part.partition("<!-- end -->")[0] for part in (ROOT / page).read_text().split(f"<!-- {mark} -->\n")[1:])
    return found
