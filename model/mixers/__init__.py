"""The zoo: every mixer by name. A new one is a file beside this and a line here."""

from model.contract import Mixer
from model.mixers.attention import Attention
from model.mixers.cross_attention import CrossAttention
from model.mixers.mamba import Mamba
from model.mixers.mla import MLA
from model.mixers.s4d import S4D

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "cross_attention": CrossAttention,
    "mamba": Mamba,
    "mla": MLA,
    "s4d": S4D,
}
