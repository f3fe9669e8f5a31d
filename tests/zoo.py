"""Every mixer in the zoo at test size, and how the laws call one."""

from functools import cache, lru_cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from model.contract import Context, Mixer
from model.documents import document_positions, open_reading
from model.errors import UserError
from model.mixers import MIXERS
from model.positions import POSITIONS
from tests.draws import HASH

WIDTH = 16
LENGTH = 63  # at which most programs run
FEW = 8  # functions kept compiled: the laws of one mixer follow each other, and then it is done with

# Settings worth a law of their own, besides every mixer's defaults. `reference` names the slow, obvious form.
VARIANTS = {
    "attention": [
        {"n_kv_heads": 2},
        {"n_kv_heads": 1},
        {"window": 4},
        {"window": 3, "sink_tokens": 2},
        {"score": "additive"},
        {"score": "multiplicative"},
        {"qk_norm": True, "gate": True},
        {"soft_cap": 2.0, "sinks": True},
        {"n_heads": 3, "head_dim": 8, "bias": "all", "qk_norm": "all", "scale": 0.5, "gate": True},
    ],
    "b2s6": [{"blocks": 2, "state": 8}],
    "bigbird": [{"block": 5, "near_blocks": 1, "random_blocks": 1, "n_kv_heads": 2}],
    "block_sparse": [{"block": 10, "pattern": "100;110;101", "n_kv_heads": 2}],
    "cosformer": [{"longest": 30, "n_heads": 1, "head_dim": 15}],
    "deltanet": [{"head_dim": 8, "conv": 2}],
    "dilated": [{"seen": 5, "dilation": 2, "n_kv_heads": 2}],
    "fixed": [{"stride": 9, "summary": 2, "n_kv_heads": 1}],
    "fnet": [{"scale": "unitary"}],
    "fox": [{"window": 4, "n_kv_heads": 2, "sinks": True}],
    "gated_deltanet": [{"head_dim": 8, "expand": 1}],
    "gla": [{"n_heads": 2, "key_dim": 5, "rank": 3}],
    "gru": [{"hidden": 12}],
    "h3": [{"head_dim": 4, "state": 8, "shift": 3}],
    "hgrn2": [{"lower_bound": 0.7, "n_heads": 2}],
    "hyena": [{"order": 3, "conv": 4, "filter_layers": 1, "bands": 2, "longest": 8, "floor": 0.1}],
    "kda": [{"head_dim": 8, "rank": 3}],
    "linear": [
        {"feature": "identity"},
        {"feature": "relu", "head_dim": 6},
        {"feature": "squared", "n_heads": 2},
        {"feature": "taylor", "key_dim": 5},
    ],
    "linformer": [
        {"rank": 5, "longest": 100, "share": "none"},
        {"rank": 5, "longest": 100, "share": "heads", "head_dim": 3},
    ],
    "local": [{"block": 10, "n_kv_heads": 1}],
    "longformer": [{"near": 4, "global_tokens": 2, "n_kv_heads": 2}, {"near": 5, "global_tokens": 0}],
    "lru": [{"window": 4}],
    "lstm": [{"hidden": 12}],
    "luna": [{"packed": 5, "tied": False}],
    "mamba": [{"norm": "learned", "dt_rank": 4}],
    "mamba2": [{"head_dim": 4, "n_groups": 2, "state": 8}],
    "mega": [
        {"attend": "laplace", "v_dim": 12},
        {"chunk": 4, "bias": "simple"},
        {"chunk": 5, "attend": "laplace", "qk_dim": 8, "ema": 3},
    ],
    "mla": [{"q_rank": 8}, {"n_heads": 3, "head_dim": 6, "v_dim": 10}],
    "mlstm": [{"key_dim": 5, "n_heads": 2}],
    "moba": [{"block": 6, "top": 2, "n_kv_heads": 2}, {"block": 3, "top": 3}],
    "nsa": [
        {"length": 2, "stride": 2, "block": 4, "top": 4, "sliding": 3, "n_kv_heads": 1},
        {"length": 4, "stride": 2, "block": 6, "top": 4, "sliding": 3, "n_kv_heads": 2},
    ],
    "nystrom": [{"landmarks": 4, "conv": 0}, {"landmarks": 3, "conv": 3, "n_heads": 2}],
    "performer": [{"n_features": 9, "seed": 1, "head_dim": 6}],
    "reformer": [{"chunk": 3, "n_buckets": 2, "rounds": 4}],
    "retention": [{"expand": 1, "n_heads": 2}],
    "rglru": [{"inner": 24, "n_heads": 2}],
    "rwkv6": [{"head_dim": 8, "mix_rank": 3}],
    "rwkv7": [{"head_dim": 16, "decay_rank": 3, "rate_rank": 2, "gate_rank": 5}],
    "s4": [{"window": 4}],
    "s4d": [{"A_init": "inv", "state": 8}, {"A_init": "legs", "discretisation": "bilinear", "state": 8}, {"window": 4}],
    "s5": [{"blocks": 2, "discretisation": "bilinear", "state": 8}, {"window": 4}],
    "sinkhorn": [
        {"block": 6, "longest": 100},
        {"block": 5, "longest": 100, "n_heads": 2, "head_dim": 3, "temperature": 0.3},
    ],
    "slstm": [{"n_heads": 2, "conv": 2}],
    "strided": [{"stride": 3, "n_kv_heads": 2}],
    "synthesizer": [
        {"kind": "random", "longest": 100},
        {"kind": "factorized", "longest": 100, "rank": 3, "head_dim": 3},
    ],
}
# A mixer that reads a memory is no sequence mixer on its own and has its tests elsewhere.
ALONE = [name for name, cls in MIXERS.items() if not cls.reads_memory]
WRITERS = [name for name in ALONE if not MIXERS[name].both_ways_only]  # that can be causal, and so write token by token
# Those that differ from another by a setting or by how they choose what to see: where whole models are built, trained
# or lowered, that other stands for them.
KIN = {
    "deltanet": ("gated_deltanet",),
    "gla": ("hgrn2",),
    "linear": ("performer", "cosformer"),
    "local": ("dilated", "strided", "fixed", "block_sparse", "longformer", "bigbird"),
    "s4d": ("dss",),
    "lstm": ("gru", "rnn"),
}
FIRST_OF_KIN = [name for name in ALONE if name not in sum(KIN.values(), ())]
# Every mixer that writes once, and every position once more.
PAIRS = [(name, "none") for name in WRITERS] + [("attention", name) for name in POSITIONS if name != "none"]
# Rows of the laws as grids of three columns.
PLACES = {name: {"columns": 3} for name, position in POSITIONS.items() if position.on_grid}
INSIDE = [name for name, position in POSITIONS.items() if position.needs_attention]
EVERY_POSITION = ("attention", "mla")  # mixers that are tried with all of them; others of the softmax have one


def positions(name: str) -> list[str]:
    """Those that act inside a mixer, by which it is tried."""
    return INSIDE if name in EVERY_POSITION else ["rope"] if MIXERS[name].softmax else []


def named(name: str, settings: dict, position: str):
    label = "-".join([name, *(f"{k}={v}" for k, v in settings.items()), position])
    return pytest.param((name, settings, position), id=label)


def matrix() -> list:
    """(mixer, settings, position) for every mixer, variant and position that acts inside it, allowed or refused."""
    return [
        named(name, settings, position)
        for name in ALONE
        for settings in [{}, *VARIANTS.get(name, [])]
        for position in ["none", *positions(name)]
    ]


def cases() -> list:
    """Every mixer's defaults without positions and, if it is one for every position, with each; variants with one."""
    found, seen = [], set()
    for case in sorted(matrix(), key=lambda case: case.values[0][2] not in ("rope", "t5")):
        name, settings, position = case.values[0]
        variant = (name, *settings.items())
        if not settings:
            wanted = position == "none" or name in EVERY_POSITION
        else:
            wanted = variant not in seen
        # Only a position can be refused: of a setting the laws are to tell.
        if wanted and not (MIXERS[name].softmax and turned_away(case.values[0])):
            found.append(case if at_once(case.values[0]) else pytest.param(*case.values, id=case.id, marks=LATER))
            seen.add(variant)
    return found


LATER = pytest.mark.scale


# One for each way of computing.
AT_ONCE = (
    *("attention", "local", "moba", "reformer", "linformer", "luna", "sinkhorn", "fnet"),
    *("linear", "gla", "deltanet", "slstm", "hyena", "mega"),
    *("s4", "s4d", "mamba", "mamba2", "rglru", "rwkv6", "lstm"),
)


def at_once(case) -> bool:
    """Whether `make test` holds it to the laws: some as they are by default, and attention's variants."""
    name, settings, position = case
    return name in AT_ONCE and ((position == "none" and not settings) or (name == "attention" and bool(settings)))


def refused(case) -> str | None:
    """Why a combination is not allowed; None if it is."""
    try:
        shapes(make(case))
    except UserError as error:
        return str(error)
    return None


def turned_away(case) -> bool:
    """Whether a mixer refuses a position before it computes anything: as `refused`, without a trace."""
    mixer = make(case)
    position = mixer.position(dtype=mixer.dtype)
    try:
        mixer.check(position)
    except UserError:
        return True
    return position.causal_only and mixer.sees_ahead


@cache  # the same object every time, so that mixers with it are equal
def placed(position: str):
    return partial(POSITIONS[position], **PLACES[position]) if position in PLACES else POSITIONS[position]


def make(case, **options) -> Mixer:
    name, settings, position = case
    place = {"position": placed(position)} if MIXERS[name].softmax else {}
    if MIXERS[name].both_ways_only:
        place["causal"] = False
    if not hasattr(MIXERS[name], "implementation"):  # there is but one
        options.pop("implementation", None)
    return MIXERS[name](width=WIDTH, **place | settings | options)


def reference(case) -> str:
    """The slow, obvious form; of a kernel cut to a window, which has no recurrence, that by transforms."""
    cls = MIXERS[case[0]]
    if "window" in case[1] and not cls.softmax:
        return "convolution"
    forms = cls.__dataclass_fields__.get("implementation")
    return "reference" if forms and "reference" in str(forms.type) else "sequential"


def inputs(B: int, L: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, L, WIDTH)), dtype)


def context(segments=None, L: int | None = None) -> Context:
    if segments is None:
        return Context(positions=jnp.arange(L, dtype=jnp.int32)[None])
    segments = jnp.asarray(segments, jnp.int32)
    positions, _ = document_positions(segments, open_reading(segments.shape[0]))
    return Context(positions=positions, segments=segments)


def params(mixer: Mixer):
    """Parameters away from their initial values, so that none is at a point where a bug would not show."""
    # Dtype and implementation change no parameter, direction and position few mixers': most share what is made here.
    plain = mixer.clone(dtype=jnp.float32, **({"implementation": None} if hasattr(mixer, "implementation") else {}))
    changes = [{}] if mixer.both_ways_only else [{"causal": True}]
    for change in [*changes, *([{"position": POSITIONS["none"]}] if mixer.softmax else [])]:
        simpler = plain.clone(**change)
        plain = simpler if shapes(simpler) == shapes(plain) else plain
    return moved(plain)


@cache
def shapes(mixer: Mixer):
    made = jax.eval_shape(mixer.init, jax.random.key(0), inputs(1, 4), context(L=4))
    return jax.tree.structure(made), [x.shape for x in jax.tree.leaves(made)]


@cache
def moved(mixer: Mixer):
    made = jax.jit(lambda key: nn.unbox(mixer.init(key, inputs(1, 4), context(L=4))))(jax.random.key(0, impl=HASH))
    noise = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * noise.normal(size=x.shape), x.dtype), jax.device_get(made))


@lru_cache(FEW)
def apply(mixer: Mixer):
    return jax.jit(mixer.apply)


@lru_cache(FEW)
def gradient(mixer: Mixer):
    """Gradients of a weighted sum of the outputs, by the parameters and by the inputs; and the outputs."""

    def objective(variables, x, ctx, weight):
        y, none = mixer.apply(variables, x, ctx)
        assert none is None
        return jnp.sum(y.astype(weight.dtype) * weight), y

    return jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))


@lru_cache(FEW)
def pull(mixer: Mixer):
    """The gradient of a weighted sum of the outputs by the inputs; and the outputs."""

    def objective(x, variables, ctx, weight):
        y, none = mixer.apply(variables, x, ctx)
        assert none is None
        return jnp.sum(jnp.where(weight != 0, y, 0) * weight), y

    return jax.jit(jax.grad(objective, has_aux=True))


def memory(mixer: Mixer, L: int) -> int:
    """Compiled temporary bytes of a training step at a length."""

    def objective(variables, x):
        return jnp.sum(mixer.apply(variables, x, context(L=L))[0] ** 2)

    step = jax.jit(jax.grad(objective, argnums=(0, 1)))
    x = jax.ShapeDtypeStruct((1, L, WIDTH), jnp.float32)
    return step.lower(params(mixer), x).compile().memory_analysis().temp_size_in_bytes


def run(mixer: Mixer, x, weight=None, ctx: Context | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The pull of a weighted sum of the outputs on the inputs, and the outputs, of rows that start from nothing.

    Rows without segments are run by the program of the truth, where nothing of what is put behind them can reach them
    (the law of causality): most laws of a mixer then need no other.
    """
    ctx, (B, L, D) = Context() if ctx is None else ctx, x.shape
    weight = np.zeros(x.shape, np.float32) if weight is None else np.asarray(weight, np.float32)
    if ctx.segments is not None or mixer.sees_ahead:
        pulled, y = pull(mixer)(np.asarray(x), params(mixer), ctx, weight)
        return np.asarray(pulled), np.asarray(y)
    assert ctx.positions is None
    longer = np.concatenate([x, inputs(B, LENGTH - L, seed=2)], axis=1)
    weight = np.concatenate([weight, np.zeros((B, LENGTH - L, D), np.float32)], axis=1)
    (_, pulled), y = gradient(mixer)(params(mixer), longer, ctx, weight)
    return np.asarray(pulled)[:, :L], np.asarray(y)[:, :L]


class Asked(Exception):
    """A mixer has asked what it was not to."""


@struct.dataclass
class Untold(Context):
    """A context that does not say whether its rows are right-padded."""

    def __getattribute__(self, name: str):
        if name == "right_padded":
            raise Asked
        return super().__getattribute__(name)


def asks(mixer: Mixer, x, ctx: Context) -> bool:
    """Whether a mixer wants to know if rows are right-padded: to one that does not, being told is no difference."""
    untold = Untold(positions=ctx.positions, segments=ctx.segments)
    try:
        jax.eval_shape(lambda variables, x: mixer.apply(variables, x, untold), params(mixer), x)
    except Asked:
        return True
    return False


def far(a, b, least: float = 1e-30) -> float:
    """Distance relative to size, and to no smaller size than `least`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), least, 1e-30))
