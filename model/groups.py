"""Which optimizer group each parameter is in (see train/optim.py)."""

import re
from collections.abc import Mapping
from typing import Any

from model.contract import RUNNING
from model.entries import entry, mlps
from model.mixers import MIXERS
from model.mlps import MLPS
from model.positions import POSITIONS

# Parameters outside the mixers: norms, biases and embeddings are not decayed, and what is measured is not trained.
SHARED_GROUPS = dict.fromkeys(("scale", "bias", *RUNNING, "embedding", "cls", "mask", "unembed_bias"), "no_decay")


def group_rules(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(pattern of a parameter's path, optimizer group); a path that none matches is in the group `decay`."""
    rules = [(rf"(.*/)?{name}", group) for name, group in SHARED_GROUPS.items()]
    sides = {"": config["mixers"]}
    if config["kind"] == "encoder_decoder":
        sides = {"encoder/": config["encoder_mixers"] or config["mixers"], "decoder/": config["mixers"]}
    entries = [entry(config, name) for mixers in sides.values() for name in mixers]
    for position in {config["position"]: None} | {one.position or "none": None for one in entries}:
        rules += [(rf"(.*/)?position/{name}", group) for name, group in POSITIONS[position].groups.items()]
    for side, mixers in sides.items():
        for i, (name, kind) in enumerate(zip(mixers, mlps(config, mixers), strict=True)):
            mlp = MLPS[kind]
            of_mlp = mlp(parent=None, width=1).groups if mlp else {}
            for part, groups in (("mixer", MIXERS[entry(config, name).mixer].groups), ("mlp", of_mlp)):
                for last, group in groups.items():
                    rules.append((rf"{side}stack/(layers|rest)/block_{i}/{part}/{re.escape(last)}", group))
    return rules
