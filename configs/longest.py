"""Rows of any length for architectures that have weights for every place of one: linformer, sinkhorn, synthesizer.

configs/archs.py matches their parameters at rows of 512 or 1,024 tokens. On longer ones they have as many weights more
as there are places, and MLPs as wide as there; a table has a column of parameters.
"""

from ml_collections import ConfigDict


def use(config: ConfigDict, length: int) -> None:
    """Gives every layer that has a longest row one of at least so many tokens."""
    rows = length + (config.model.pool == "cls")  # a vector in front of the row
    for name in config.model.mixers:
        section = config.model.get(name, {})
        if "longest" in section:
            section.longest = max(section.longest, rows)
