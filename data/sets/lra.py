"""The archive of Long Range Arena (Tay et al., 2020, https://github.com/google-research/long-range-arena).

It holds ListOps, AAN and Pathfinder. Its authors state no checksum, and none is known here; what was prepared has a
digest of its own, and rows are counted where their number was published.
"""

from data.sets.release import Download

URL = "https://storage.googleapis.com/long-range-arena/lra_release.gz"


def archive(folder: str) -> Download:
    """The archive, or this folder of it, unpacked where the archive puts it or moved up."""
    return Download("lra_release.gz", URL, (f"lra_release/lra_release/{folder}", f"lra_release/{folder}", folder))
