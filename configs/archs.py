"""Named architectures: what each changes in the model section of a config, and sizes at which they are matched.

A comparison is fair at equal numbers of parameters: `use_matched` gives an architecture as many as `attention` has at
that size, within 3 %, embeddings and head aside. Those with an MLP have it made wider or narrower; the others have more
layers, or are wider; those whose mixers take more layers for one turn have these, and are narrower. Where they read
both ways, state spaces (s4, s4d, dss, s5, lru, mega) have a second map out of their state, up to 9 % more at tiny, 6 %
at small and 3 % above that; rnn, lstm, gru and hyena, which would have more, are matched anew.
"""

from typing import Any

from ml_collections import ConfigDict

from model.entries import entry
from model.errors import choose
from model.mixers import MIXERS

# The Transformer's shape (arXiv:1706.03762): norms after the sums and none at the end, waves added to the embeddings.
TRANSFORMER = dict(
    kind="encoder_decoder",
    mixers=("attention",),
    position="sinusoidal",
    norm="layernorm",
    norm_order="post",
    final_norm=False,
    mlp="relu",
)

ARCHS = {
    "attention": dict(mixers=("attention",), position="rope"),  # multi-head softmax attention, rotary positions
    "alibi": dict(mixers=("attention",), position="alibi"),  # multi-head softmax attention, linear biases
    "mqa": dict(mixers=("attention",), position="rope", attention=dict(n_kv_heads=1)),  # one key-value head
    "window": dict(mixers=("attention",), position="rope", attention=dict(window=64)),  # each token sees the last 64
    "local": dict(mixers=("local",), position="rope"),  # each token sees its own block of 64
    "dilated": dict(mixers=("dilated",), position="rope"),  # each token sees every fourth of the last 256
    "strided": dict(mixers=("strided",), position="rope"),  # heads see the last 64, or every 64th
    "fixed": dict(mixers=("fixed",), position="rope"),  # heads see their own 64, or the last 8 of every 64
    "block_sparse": dict(mixers=("block_sparse",), position="rope"),  # blocks of 64 by a table
    "longformer": dict(mixers=("longformer",), position="rope"),  # each token sees the last 64 and the first 8
    "bigbird": dict(mixers=("bigbird",), position="rope"),  # blocks of 64: the near, the first, and 3 at random
    "mla": dict(mixers=("mla",), position="rope"),  # multi-head latent attention: a compressed key-value cache
    "fox": dict(mixers=("fox",)),  # softmax attention that forgets as tokens decide, in the place of positions
    "linear": dict(mixers=("linear",)),  # linear attention: sums of keys and values in place of scores
    # Based's attention: the exponential to its second order, of 16 channels
    "taylor": dict(mixers=("linear",), linear=dict(feature="taylor")),
    "retention": dict(mixers=("retention",)),  # RetNet: linear attention whose heads fade at fixed rates
    "gla": dict(mixers=("gla",)),  # gated linear attention: channels fade as tokens decide
    "hgrn2": dict(mixers=("hgrn2",)),  # the same with forget gates for keys
    # FNet: a Fourier transform over width and length; norms behind the sums, as in the paper
    "fnet": dict(
        mixers=("fnet",), causal=False, position="sinusoidal", norm="layernorm", norm_order="post", final_norm=False
    ),
    # Linformer: keys and values summed over rows of up to 1,024 tokens, to as many as in Long Range Arena
    "linformer": dict(
        mixers=("linformer",), causal=False, position="sinusoidal", linformer=dict(rank=16, longest=1024)
    ),
    "nystrom": dict(mixers=("nystrom",), causal=False, position="sinusoidal"),  # attention by way of 64 landmarks
    "moba": dict(mixers=("moba",), position="rope"),  # softmax attention to the blocks that each query chooses
    "mlstm": dict(mixers=("mlstm",)),  # xLSTM's matrix memory: exponential input gates
    "performer": dict(mixers=("performer",)),  # softmax's kernel by random features
    "cosformer": dict(mixers=("cosformer",)),  # linear attention weighted by the cosine of the distance
    # Synthesizer: each token scores positions, of up to 512, and looks at no other token to do so
    "synthesizer": dict(mixers=("synthesizer",), position="sinusoidal", synthesizer=dict(longest=512)),
    # native sparse attention: compressed keys, the blocks they point to, and a window; all heads choose together
    "nsa": dict(mixers=("nsa",), position="rope", nsa=dict(n_kv_heads=1)),
    "luna": dict(mixers=("luna",), position="sinusoidal"),  # 16 vectors a layer pack the tokens, which read them
    "reformer": dict(mixers=("reformer",), position="rope"),  # softmax attention among tokens that are hashed alike
    # Sinkhorn: blocks of 32 tokens, each with another that is sorted to it, of rows of up to 1,024 tokens
    "sinkhorn": dict(mixers=("sinkhorn",), causal=False, position="sinusoidal", sinkhorn=dict(longest=1024)),
    "s4d": dict(mixers=("s4d",)),  # diagonal state space, the same at every token
    "dss": dict(mixers=("dss",)),  # the same with HiPPO's modes, and one weight for its B and C
    "s4": dict(mixers=("s4",)),  # state space with HiPPO's matrix, diagonal plus low rank
    "s5": dict(mixers=("s5",)),  # one diagonal state space for all channels
    "lru": dict(mixers=("lru",)),  # the same, its modes drawn from a ring
    "b2s6": dict(mixers=("b2s6",)),  # a diagonal state space, in part decided by the token, in blocks of channels
    "h3": dict(mixers=("h3",)),  # two state spaces, with products of keys, values and queries between them
    # gates and long convolutions in turn, whose filters a network of sines makes
    "hyena": dict(mixers=("hyena",), hyena=dict(frequency=10.0)),
    "mega": dict(mixers=("mega",)),  # gated attention with one head, behind a moving average
    "mega_chunk": dict(mixers=("mega",), mega=dict(chunk=128)),  # the same, within chunks of 128 tokens
    "mamba": dict(mixers=("mamba",), mlp="none"),  # selective state space, no MLP between the layers
    "mamba2": dict(mixers=("mamba2",), mlp="none", mamba2=dict(state=64)),  # one decay a head: matrix products
    "rglru": dict(mixers=("rglru",)),  # Hawk: gated linear recurrences alone
    "rwkv": dict(mixers=("rwkv",)),  # RWKV-4: an average with decaying weights
    # RWKV-6: a matrix state, decay decided by the token; ranks for small widths
    "rwkv6": dict(mixers=("rwkv6",), rwkv6=dict(mix_rank=8, decay_rank=16)),
    # RWKV-7: the same under a generalised delta rule
    "rwkv7": dict(mixers=("rwkv7",), rwkv7=dict(decay_rank=16, rate_rank=16, gate_rank=32)),
    "deltanet": dict(mixers=("deltanet",)),  # the delta rule: a matrix state that is corrected, not added to
    "gated_deltanet": dict(mixers=("gated_deltanet",)),  # the same on a state that forgets as the token decides
    "kda": dict(mixers=("kda",)),  # Kimi Delta Attention: each channel forgets at its own rate
    "rnn": dict(mixers=("rnn",), mlp="none"),  # a tanh of the token and the last state, wide
    "lstm": dict(mixers=("lstm",), mlp="none"),  # gated recurrence, one token after another
    "slstm": dict(mixers=("slstm",)),  # xLSTM's scalar memory: exponential gates, recurrences within heads
    "gru": dict(mixers=("gru",), mlp="none"),  # gated recurrence with three gates instead of four
    # Recurrent encoder and decoder, for tasks with a source or that ask at the end of their rows; the decoder looks at
    # every token of the source (arXiv:1409.0473), or knows one vector of it (arXiv:1406.1078).
    "seq2seq": dict(kind="seq2seq", mixers=()),
    "seq2seq_vector": dict(kind="seq2seq", mixers=(), seq2seq=dict(attention=False)),
    "transformer": TRANSFORMER,  # encoder and decoder of attention, in any size
    # The base model of the paper's table 3; its waves are as large as its embeddings, times the root of the width.
    "transformer_base": TRANSFORMER
    | dict(
        width=512,
        layers=6,
        mlp_width=2048,
        dropout=0.1,
        embed_scale=512**0.5,
        sinusoidal=dict(amplitude=1.0),
        attention=dict(n_heads=8),
        cross_attention=dict(n_heads=8),
    ),
    "hybrid": dict(mixers=("mamba", "attention")),  # alternating, positions from the recurrence alone
    # Jamba (arXiv:2403.19887): one attention layer in eight, the fifth, without positions.
    "jamba": dict(mixers=("mamba",) * 4 + ("attention",) + ("mamba",) * 3),
    # Griffin (arXiv:2402.19427): two recurrent layers, then one of multi-query attention to the last 1,024 tokens.
    "griffin": dict(mixers=("rglru", "rglru", "attention"), position="rope", attention=dict(window=1024, n_kv_heads=1)),
    # Samba (arXiv:2406.07522): alternating, attention to the last 2,048 tokens.
    "samba": dict(mixers=("mamba", "attention"), position="rope", attention=dict(window=2048)),
    # Gemma 3 (arXiv:2503.19786): five layers that see the last 1,024 tokens, then one that sees all and turns slower.
    "gemma3": dict(
        mixers=("near",) * 5 + ("global",),
        norm_order="sandwich",
        mlp="geglu",
        near=dict(mixer="attention", position="rope", window=1024, qk_norm=True),
        **{"global": dict(mixer="attention", position="rope", rope=dict(theta=1e6), qk_norm=True)},
    ),
}


# Width and layers of `attention`, whose MLPs are SwiGLUs.
SIZES = {
    "tiny": dict(width=64, layers=2),
    "small": dict(width=128, layers=4),
    "medium": dict(width=256, layers=6),
    "large": dict(width=512, layers=6),
}
MLP_WIDTHS = {
    "attention": (184, 352, 704, 1376),
    "alibi": (184, 352, 704, 1376),
    "mqa": (216, 416, 832, 1632),
    "window": (184, 352, 704, 1376),
    "local": (184, 352, 704, 1376),
    "dilated": (184, 352, 704, 1376),
    "strided": (184, 352, 704, 1376),
    "fixed": (184, 352, 704, 1376),
    "block_sparse": (184, 352, 704, 1376),
    "longformer": (120, 224, 448, 864),
    "bigbird": (184, 352, 704, 1376),
    "fox": (184, 352, 704, 1376),
    "mega": (48, 136, 320, 648),
    "mega_chunk": (48, 136, 320, 648),
    "mla": (168, 384, 816, 1664),
    "linear": (184, 352, 704, 1376),
    "taylor": (184, 400, 832, 1680),
    "retention": (96, 176, 368, 688),
    "gla": (176, 336, 688, 1360),
    "hgrn2": (184, 352, 704, 1376),
    "fnet": (272, 520, 1048, 2056),
    "nystrom": (184, 352, 704, 1376),
    "synthesizer": (32, 224, 616, 1376),
    "luna": (160, 304, 616, 1200),
    "sinkhorn": (120, 264, 576, 1160),
    "linformer": (96, 312, 680, 1368),
    "moba": (184, 352, 704, 1376),
    "mlstm": (184, 352, 704, 1376),
    "performer": (184, 352, 704, 1376),
    "cosformer": (184, 352, 704, 1376),
    "nsa": (96, 184, 384, 744),
    "reformer": (208, 392, 792, 1544),
    "s4d": (184, 400, 832, 1680),
    "dss": (184, 400, 832, 1680),
    "s4": (136, 352, 784, 1632),
    "s5": (184, 400, 832, 1680),
    "lru": (184, 400, 832, 1680),
    "b2s6": (168, 384, 816, 1664),
    "h3": (120, 288, 640, 1312),
    "hyena": (80, 280, 640, 1320),
    "rglru": (192, 368, 736, 1456),
    "rwkv": (184, 352, 704, 1376),
    "rwkv6": (120, 272, 576, 1168),
    "rwkv7": (136, 304, 656, 1328),
    "deltanet": (176, 344, 696, 1368),
    "gated_deltanet": (88, 176, 352, 680),
    "kda": (160, 304, 616, 1280),
    "slstm": (224, 432, 872, 1712),
    "hybrid": (144, 288, 592, 1168),
    "samba": (144, 288, 592, 1168),
}
LAYERS_AND_WIDTHS = {  # of those without an MLP
    "mamba": ((3, 66), (7, 128), (11, 256), (11, 512)),
    "mamba2": ((3, 64), (7, 128), (11, 256), (10, 544)),
    "rnn": ((2, 160), (6, 256), (9, 512), (9, 1024)),
    "lstm": ((2, 80), (6, 128), (9, 256), (9, 512)),
    "gru": ((3, 76), (8, 128), (12, 256), (12, 512)),
}
# Layers, widths, and widths of the MLPs, of those whose mixers take more layers for one turn than others have.
TURNS = {
    "jamba": ((8, 32, 40), (8, 88, 176), (8, 224, 416), (8, 456, 792)),
    "griffin": ((3, 56, 144), (4, 128, 384), (6, 256, 768), (6, 512, 1520)),
    "gemma3": ((6, 40, 88), (6, 104, 288), (6, 256, 704), (6, 512, 1376)),
}
MATCHED = {
    **{arch: [dict(mlp_width=n) for n in widths] for arch, widths in MLP_WIDTHS.items()},
    **{arch: [dict(layers=n, width=w) for n, w in found] for arch, found in LAYERS_AND_WIDTHS.items()},
    **{arch: [dict(layers=n, width=w, mlp_width=m) for n, w, m in found] for arch, found in TURNS.items()},
}
HALVES = {  # layers and widths of those that read each way with half the width
    "rnn": ((3, 152), (8, 256), (12, 512), (12, 1024)),
    "lstm": ((3, 76), (8, 128), (12, 256), (12, 512)),
    "gru": ((4, 76), (11, 126), (16, 256), (16, 512)),
}
BOTH_WAYS = {
    "hyena": [dict(mlp_width=n) for n in (40, 232, 600, 1288)],
    **{
        arch: [{"layers": n, "width": w, arch: dict(hidden=w // 2)} for n, w in found] for arch, found in HALVES.items()
    },
}


def use(config: ConfigDict, arch: str, **model: Any) -> None:
    """Writes a named architecture into a config's model section, with these settings in place of its own."""
    config.model.update(choose("arch", arch, ARCHS))
    config.model.update(model)
    use_layers(config, config.model.layers)


def use_matched(config: ConfigDict, arch: str, size: str, both_ways: bool = False) -> None:
    """The same, with as many parameters as the others have at that size, reading forward or both ways."""
    shape = choose("size", size, SIZES)
    matched = MATCHED | BOTH_WAYS if both_ways else MATCHED
    there = {name: matched[name] for name in ARCHS if name in matched}
    use(config, arch, **shape | choose("arch of matched size", arch, there)[list(SIZES).index(size)])


def use_layers(config: ConfigDict, layers: int) -> None:
    """So many, or as many as it takes for each mixer to have its turn."""
    config.model.layers = max(layers, len(config.model.mixers))


def read_bidirectionally(config: ConfigDict) -> None:
    """Lets all tokens see all others, unless a mixer runs forward only."""
    kinds = (MIXERS[entry(config.model, name).mixer] for name in config.model.mixers)
    config.model.causal = any(kind.forward_only for kind in kinds)


def use_bare(config: ConfigDict, arch: str, width: int = 64) -> None:
    """As in Zoology: two layers, no MLP between them, nothing but the mixer to do the work."""
    use(config, arch)
    use_layers(config, 2)
    config.model.width, config.model.mlp, config.model.tied = width, "none", False
