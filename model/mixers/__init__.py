"""The zoo: every mixer by name. A new one is a file beside this and a line here."""

from model.contract import Mixer
from model.mixers.attention import Attention
from model.mixers.b2s6 import B2S6
from model.mixers.bigbird import BigBird
from model.mixers.block_sparse import BlockSparse
from model.mixers.cross_attention import CrossAttention
from model.mixers.dilated import Dilated
from model.mixers.dss import DSS
from model.mixers.fox import Fox
from model.mixers.local import Local
from model.mixers.longformer import Longformer
from model.mixers.lru import LRU
from model.mixers.mamba import Mamba
from model.mixers.mamba2 import Mamba2
from model.mixers.mla import MLA
from model.mixers.recurrent import GRU, LSTM, RNN
from model.mixers.rglru import RGLRU
from model.mixers.rwkv import RWKV
from model.mixers.rwkv6 import RWKV6
from model.mixers.s4 import S4
from model.mixers.s4d import S4D
from model.mixers.s5 import S5
from model.mixers.strided import Fixed, Strided

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "b2s6": B2S6,
    "bigbird": BigBird,
    "block_sparse": BlockSparse,
    "cross_attention": CrossAttention,
    "dilated": Dilated,
    "dss": DSS,
    "fixed": Fixed,
    "fox": Fox,
    "gru": GRU,
    "local": Local,
    "longformer": Longformer,
    "lstm": LSTM,
    "lru": LRU,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mla": MLA,
    "rglru": RGLRU,
    "rnn": RNN,
    "rwkv": RWKV,
    "rwkv6": RWKV6,
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
    "strided": Strided,
}
