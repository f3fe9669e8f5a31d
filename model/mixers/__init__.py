"""The zoo: every mixer by name. A new one is a file beside this and a line here."""

from model.contract import Mixer
from model.mixers.attention import Attention
from model.mixers.b2s6 import B2S6
from model.mixers.bigbird import BigBird
from model.mixers.block_sparse import BlockSparse
from model.mixers.cosformer import Cosformer
from model.mixers.cross_attention import CrossAttention
from model.mixers.deltanet import DeltaNet
from model.mixers.dilated import Dilated
from model.mixers.dss import DSS
from model.mixers.fnet import FNet
from model.mixers.fox import Fox
from model.mixers.gated_deltanet import GatedDeltaNet
from model.mixers.gla import GLA
from model.mixers.h3 import H3
from model.mixers.hgrn2 import HGRN2
from model.mixers.hyena import Hyena
from model.mixers.kda import KDA
from model.mixers.linear import Linear
from model.mixers.linformer import Linformer
from model.mixers.local import Local
from model.mixers.longformer import Longformer
from model.mixers.lru import LRU
from model.mixers.luna import Luna
from model.mixers.mamba import Mamba
from model.mixers.mamba2 import Mamba2
from model.mixers.mega import Mega
from model.mixers.mla import MLA
from model.mixers.mlstm import MLSTM
from model.mixers.moba import MoBA
from model.mixers.nsa import NSA
from model.mixers.nystrom import Nystrom
from model.mixers.performer import Performer
from model.mixers.recurrent import GRU, LSTM, RNN
from model.mixers.reformer import Reformer
from model.mixers.retention import Retention
from model.mixers.rglru import RGLRU
from model.mixers.rwkv import RWKV
from model.mixers.rwkv6 import RWKV6
from model.mixers.rwkv7 import RWKV7
from model.mixers.s4 import S4
from model.mixers.s4d import S4D
from model.mixers.s5 import S5
from model.mixers.sinkhorn import Sinkhorn
from model.mixers.slstm import SLSTM
from model.mixers.strided import Fixed, Strided
from model.mixers.synthesizer import Synthesizer

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "b2s6": B2S6,
    "bigbird": BigBird,
    "block_sparse": BlockSparse,
    "cosformer": Cosformer,
    "cross_attention": CrossAttention,
    "deltanet": DeltaNet,
    "dilated": Dilated,
    "dss": DSS,
    "fixed": Fixed,
    "fnet": FNet,
    "fox": Fox,
    "gated_deltanet": GatedDeltaNet,
    "gla": GLA,
    "gru": GRU,
    "h3": H3,
    "hgrn2": HGRN2,
    "hyena": Hyena,
    "kda": KDA,
    "linear": Linear,
    "linformer": Linformer,
    "local": Local,
    "longformer": Longformer,
    "lru": LRU,
    "lstm": LSTM,
    "luna": Luna,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "mega": Mega,
    "mla": MLA,
    "mlstm": MLSTM,
    "moba": MoBA,
    "nsa": NSA,
    "nystrom": Nystrom,
    "performer": Performer,
    "reformer": Reformer,
    "retention": Retention,
    "rglru": RGLRU,
    "rnn": RNN,
    "rwkv": RWKV,
    "rwkv6": RWKV6,
    "rwkv7": RWKV7,
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
    "sinkhorn": Sinkhorn,
    "slstm": SLSTM,
    "strided": Strided,
    "synthesizer": Synthesizer,
}
