"""MLPs: what a layer makes of each token by itself. As sub-layers of a block they obey the contract of a mixer."""

from collections.abc import Callable

from model.contract import Mixer
from model.mlps.channel_mix import ChannelMix
from model.mlps.experts import Experts
from model.mlps.mlp import FORMS, mlp_width

MLPS: dict[str, Callable[..., Mixer] | None] = FORMS | {
    "channel_mix": ChannelMix,
    "experts": Experts,
    "none": None,
}

__all__ = ["MLPS", "mlp_width"]
