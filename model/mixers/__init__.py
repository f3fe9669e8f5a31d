"""The zoo: every mixer by name. A new one is a file beside this and a line here."""

from model.contract import Mixer
from model.mixers.attention import Attention
from model.mixers.b2s6 import B2S6
from model.mixers.cross_attention import CrossAttention
from model.mixers.dss import DSS
from model.mixers.fnet import FNet
from model.mixers.fox import Fox
from model.mixers.linformer import Linformer
from model.mixers.lru import LRU
from model.mixers.luna import Luna
from model.mixers.mamba import Mamba
from model.mixers.mamba2 import Mamba2
from model.mixers.mla import MLA
from model.mixers.nystrom import Nystrom
from model.mixers.recurrent import GRU, LSTM, RNN
from model.mixers.rglru import RGLRU
from model.mixers.rwkv import RWKV
from model.mixers.rwkv6 import RWKV6
from model.mixers.s4 import S4
from model.mixers.s4d import S4D
from model.mixers.s5 import S5
from model.mixers.sinkhorn import Sinkhorn
from model.mixers.synthesizer import Synthesizer

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "b2s6": B2S6,
    "cross_attention": CrossAttention,
    "dss": DSS,
    "fnet": FNet,
    "fox": Fox,
    "gru": GRU,
    "linformer": Linformer,
    "lstm": LSTM,
    "lru": LRU,
    "luna": Luna,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mla": MLA,
    "nystrom": Nystrom,
    "rglru": RGLRU,
    "rnn": RNN,
    "rwkv": RWKV,
    "rwkv6": RWKV6,
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
    "sinkhorn": Sinkhorn,
    "synthesizer": Synthesizer,
}
