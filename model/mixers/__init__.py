"""The zoo: every mixer by name. A new one is a file beside this and a line here."""

from model.contract import Mixer
from model.mixers.attention import Attention
from model.mixers.mamba import Mamba
from model.mixers.s4d import S4D

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "mamba": Mamba,
    "s4d": S4D,
}
