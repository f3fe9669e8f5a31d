"""Published settings by family and task: what `size=paper` of configs/lra.py and configs/seqimage.py writes.

LRA's own Transformer: the released configurations (https://github.com/google-research/long-range-arena, cd31e5c,
lra_benchmarks/*/configs; its base rates over the root of the warm-up are peaks here). The baselines that it is compared
with there share its settings on ListOps, Text and Retrieval, where their configurations name another model and little
else; of Image and Pathfinder each has its own, and of Path-X none. For Mamba we found no settings. S4 and S4D: the
third version's (https://github.com/state-spaces/s4, e757cef, configs/experiment/lra/old/v3-*.yaml; of Path-X
s4-pathx.yaml, whose rate and warm-up are not the papers' 5e-4 and one epoch). S5: run_experiments of
https://github.com/lindermanlab/S5, 3c18fdb. LRU: not its authors' but a replication's, in S4's code
(https://github.com/jhuang265/s4, 109a2d2, of Image 06f4700, configs/experiment/lra/lru-*.yaml). B2S6: its paper's
appendix F (https://arxiv.org/abs/2505.09022), which leaves warm-up, dropout and the lower rate of the steps to its
code; here they are S4's. Norms are theirs: over the batch, but of layers in S4 and B2S6 on images. A state space's own
parameters have their published rates, and are decayed where they are there.

Of pictures read pixel by pixel (smnist, scifar): S4 on digits as in the Annotated S4, which reads forward
(https://github.com/srush/annotated-s4, 20 epochs), on colours as in its own code (s4, 43f5b0c,
configs/experiment/cifar/s4-cifar.yaml), and S4D as S4; S5 on digits, forward, by a fork of its code
(https://github.com/msgwak/LAST, 47c53f2, bin/run_experiments/run_mnist.sh), on colours with its settings of Image, as
the LRU, whose paper has Image in colour and whose replication in grey.

What they have and these do not. All: padding counts in the statistics of norms, and norms and biases are decayed. S4:
on images its A and B are shared among channels and dropout is the same along a row; it drops behind the gate too; of
colours its cosine would end a tenth later than training does. The Annotated S4 warms up along a cosine. S5: other draws
of C; half a gate, with one matrix where this one has two; on Path-X B is decayed at the state space's rate; on images
modes are clipped and not exponentials. LRU's replication reads forward only, with no gate after a layer. LRA's: dropout
of attention's weights, of embeddings and within MLPs; a head with a hidden layer; its mean over a row counts padding.
Of the baselines, the Sparse Transformer (`fixed`) reads forward there, Sinkhorn sorts by one softmax, Performer has a
ReLU for a kernel but on ListOps, and Synthesizer adds its scores to attention's.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from model.errors import choose


class Recipe(NamedTuple):
    layers: int
    width: int
    norm_order: str
    dropout: float
    lr: float
    ssm_lr: float  # of the parameters in a mixer's `ssm` group
    weight_decay: float
    batch_size: int
    steps: int
    warmup: int
    mixer: Mapping[str, Any] = MappingProxyType({})  # settings of the mixer's own
    norm: str = "batchnorm"
    momentum: float = 0.9  # of the running statistics
    final_norm: bool = True  # behind the last layer, where norms stand before the others
    pool: str = "mean"
    groups: Mapping[str, str] = MappingProxyType({})  # of parameters of the mixer, where not as it says itself
    forward: bool = False  # each pixel sees those before it alone


class Transformer(NamedTuple):
    layers: int
    width: int
    n_heads: int
    head_dim: int
    mlp_width: int
    pool: str
    dropout: float
    lr: float
    schedule: str
    weight_decay: float
    batch_size: int
    steps: int
    warmup: int
    clip: float = 0.0
    learned: int = 0  # positions to learn: the pixels and, where one vector stands for all, that one; 0: waves


Recipes = Mapping[str, Mapping[str, Recipe | Transformer]]  # of architectures by task


def ring(modes: int, r_min: float, r_max: float, turn: float = 2.0) -> dict[str, Any]:
    """So many complex modes between two circles, which turn by up to `turn` times pi a token."""
    return dict(state=2 * modes, r_min=r_min, r_max=r_max, max_phase=turn * math.pi)


DECAYED = dict(C="decay", D="decay")  # of S4, whose A, B and steps alone are not


def s4(*recipe: Any, **other: Any) -> Recipe:
    """One of S4's where its steps have the rate of all parameters; they are not decayed."""
    return Recipe(*recipe, groups=DECAYED | dict(log_dt="no_decay"), **other)


def s5(*recipe: Any, momentum: float = 0.95, forward: bool = False, **groups: str) -> Recipe:
    """One of S5's: norms before the layers alone, and running statistics that keep more."""
    groups = dict(D="decay") | groups
    return Recipe(*recipe, momentum=momentum, final_norm=False, groups=groups, forward=forward)


TRANSFORMER = {
    "listops": Transformer(4, 512, 8, 64, 1024, "cls", 0.1, 0.05 * 1000**-0.5, "rsqrt", 0.1, 32, 5000, 1000),
    "text": Transformer(4, 256, 4, 64, 1024, "cls", 0.1, 0.05 * 8000**-0.5, "rsqrt", 0.1, 32, 20_000, 8000),
    "retrieval": Transformer(4, 128, 4, 32, 512, "cls", 0.1, 0.05 * 8000**-0.5, "rsqrt", 0.1, 32, 5000, 8000),
    "image": Transformer(1, 128, 8, 8, 128, "cls", 0.3, 5e-4, "cosine", 0.0, 256, 35_000, 175, learned=1024 + 1),
    "pathfinder": Transformer(4, 32, 4, 4, 32, "mean", 0.2, 1e-3, "cosine", 0.0, 512, 62_400, 312),
    "pathx": Transformer(1, 32, 2, 8, 32, "mean", 0.1, 1e-3, "cosine", 0.0, 64, 500_000, 2500, 1.0, learned=128**2),
}
S4 = {
    "listops": s4(8, 128, "post", 0.0, 0.01, 1e-3, 0.05, 50, 80_000, 1000),
    "text": s4(6, 256, "pre", 0.0, 0.01, 1e-3, 0.05, 16, 50_000, 1000),
    "retrieval": s4(6, 256, "pre", 0.0, 0.01, 1e-3, 0.05, 64, 50_000, 2500),
    "image": s4(6, 512, "post", 0.1, 0.01, 1e-3, 0.05, 50, 180_000, 900, norm="layernorm"),
    "pathfinder": Recipe(6, 256, "pre", 0.0, 0.004, 1e-3, 0.03, 64, 500_000, 2500, pool="last", groups=DECAYED),
    "pathx": Recipe(6, 256, "pre", 0.0, 1e-3, 5e-4, 0.05, 16, 500_000, 50_000, dict(dt_min=1e-4), groups=DECAYED),
}
ANNOTATED = dict(norm="layernorm", final_norm=False, forward=True)
S4_DIGITS = Recipe(4, 128, "pre", 0.25, 5e-3, 5e-4, 0.01, 128, 8437, 843, groups=DECAYED, **ANNOTATED)
S4_COLOURS = Recipe(6, 512, "post", 0.1, 0.01, 1e-3, 0.05, 50, 180_000, 1000, norm="layernorm", groups=DECAYED)
S5 = {  # epochs of the training sets as steps; a warm-up of one epoch, on Text of none
    "listops": s5(8, 128, "pre", 0.0, 0.003, 1e-3, 0.04, 50, 76_800, 1920, dict(state=16, blocks=8), B="decay"),
    "text": s5(6, 256, "pre", 0.1, 0.004, 1e-3, 0.07, 50, 17_500, 0, dict(state=192, blocks=12), log_dt="decay"),
    "retrieval": s5(
        6, 128, "pre", 0.0, 0.002, 1e-3, 0.05, 32, 91_920, 4596, dict(state=256, blocks=16), log_dt="decay"
    ),
    "image": s5(6, 512, "pre", 0.1, 0.0045, 1e-3, 0.07, 50, 225_000, 900, dict(state=384, blocks=3), B="decay"),
    "pathfinder": s5(
        6, 192, "pre", 0.05, 0.0045, 9e-4, 0.03, 64, 500_000, 2500, dict(state=256, blocks=8), momentum=0.9
    ),
    "pathx": s5(
        6, 128, "pre", 0.0, 0.0018, 6e-4, 0.06, 32, 375_000, 5000, dict(state=256, blocks=16, dt_min=1e-4), momentum=0.9
    ),
}
S5_DIGITS = s5(4, 96, "pre", 0.1, 0.008, 2e-3, 0.01, 50, 162_000, 1080, dict(state=128), forward=True)
LRU = {
    "listops": Recipe(6, 128, "pre", 0.0, 0.003, 1.5e-3, 0.05, 32, 90_000, 12_000, ring(256, 0.0, 0.9)),
    "text": Recipe(6, 256, "pre", 0.1, 0.004, 4e-4, 0.05, 32, 50_000, 5000, ring(192, 0.5, 0.9)),
    "retrieval": Recipe(6, 128, "pre", 0.1, 0.002, 1e-3, 0.05, 64, 100_000, 5000, ring(256, 0.5, 0.9)),
    "image": Recipe(6, 512, "post", 0.1, 0.005, 1.25e-3, 0.05, 50, 180_000, 18_000, ring(384, 0.9, 0.999)),
    "pathfinder": Recipe(6, 192, "pre", 0.0, 0.004, 1e-3, 0.05, 64, 500_000, 50_000, ring(256, 0.9, 0.999)),
    "pathx": Recipe(6, 128, "pre", 0.0, 0.002, 5e-4, 0.05, 32, 250_000, 25_000, ring(256, 0.999, 0.9999, turn=0.1)),
}
B2S6 = {  # epochs of the training sets as steps
    "listops": Recipe(8, 128, "post", 0.0, 0.008, 1e-3, 0.03, 32, 360_000, 1000),
    "text": Recipe(6, 256, "pre", 0.0, 0.01, 1e-3, 0.05, 16, 62_500, 1000),
    "retrieval": Recipe(6, 128, "pre", 0.0, 0.004, 1e-3, 0.03, 60, 490_200, 2500),
    "image": Recipe(6, 512, "post", 0.1, 0.01, 1e-3, 0.05, 48, 468_500, 900, norm="layernorm"),
    "pathfinder": Recipe(6, 256, "pre", 0.0, 0.004, 1e-3, 0.03, 48, 833_250, 2500),
    "pathx": Recipe(6, 128, "pre", 0.0, 0.001, 5e-4, 0.03, 24, 800_000, 50_000, dict(dt_min=1e-4)),
}
IMAGES = ("image", "pathfinder")
# Of LRA's other baselines, what their own mixers have: lra_benchmarks/models, and of Performer and Linformer configs.
# Longformer's window of 512 has 255 tokens before a token and 256 behind it; Reformer's rows are of ten chunks.
BASELINES = {
    "local": lambda task: dict(block=64 if task in IMAGES else 50),
    "fixed": lambda task: dict(stride=50, summary=10),
    "longformer": lambda task: dict(near=256, global_tokens=0),
    "linformer": lambda task: dict(rank=32 if task == "text" else 16),
    "reformer": lambda task: dict(chunk=LENGTHS[task] // 10, n_buckets=10, rounds=1),
    "sinkhorn": lambda task: dict(block=64 if task in IMAGES else 50),
    "synthesizer": lambda task: dict(kind="random") if task in IMAGES else {},
    "bigbird": lambda task: dict(block=64),
    "linear": lambda task: {},
    "performer": lambda task: dict(n_features=2) if task == "listops" else {},
}
OF_LRA = ("attention", *BASELINES)  # whose recipes are the benchmark's own, and read token ids
LENGTHS = {"listops": 2000, "text": 1000, "retrieval": 4000, "image": 1024, "pathfinder": 1024}
SHARED = {task: TRANSFORMER[task] for task in ("listops", "text", "retrieval")}


def sized(task: str, layers: int, width: int, n_heads: int, **other: Any) -> Transformer:
    """The Transformer's settings of a task for a model of another size, whose heads are half as wide as it together."""
    size = dict(layers=layers, width=width, n_heads=n_heads, head_dim=width // 2 // n_heads, mlp_width=width)
    return TRANSFORMER[task]._replace(**size | other)


def pooled(task: str, *size: int) -> Transformer:
    return sized(task, *size, pool="mean", learned=LENGTHS[task])


# Of each its Image and its Pathfinder. BigBird's heads of Image are four under a name that nothing there reads;
# Reformer's are as wide together as the model.
PIXELS = {
    "local": (pooled("image", 1, 128, 2), sized("pathfinder", 2, 64, 4, dropout=0.1)),
    "fixed": (sized("image", 1, 128, 8), sized("pathfinder", 1, 32, 8)),
    "longformer": (pooled("image", 4, 128, 4), sized("pathfinder", 2, 32, 2, dropout=0.1)),
    "linformer": (sized("image", 1, 128, 8), sized("pathfinder", 1, 32, 2)),
    "reformer": (sized("image", 4, 64, 8, head_dim=8), sized("pathfinder", 2, 64, 8, head_dim=8)),
    "sinkhorn": (
        sized("image", 1, 32, 1, head_dim=32, mlp_width=64, dropout=0.1, weight_decay=0.7),
        sized("pathfinder", 2, 32, 4, mlp_width=64),
    ),
    "synthesizer": (sized("image", 1, 128, 8), sized("pathfinder", 2, 64, 4)),
    "bigbird": (sized("image", 1, 128, 4), sized("pathfinder", 4, 64, 2)),
    "linear": (sized("image", 1, 128, 8), sized("pathfinder", 1, 128, 2)),
    "performer": (sized("image", 1, 128, 8), sized("pathfinder", 4, 32, 8)),
}
RECIPES = {
    "attention": TRANSFORMER,
    "s4": S4,
    "s4d": S4,
    "s5": S5,
    "lru": LRU,
    "b2s6": B2S6,
    **{arch: SHARED | dict(zip(IMAGES, PIXELS[arch], strict=True)) for arch in BASELINES},
}
IN_A_ROW = {  # pictures, pixel by pixel
    "s4": {"smnist": S4_DIGITS, "scifar": S4_COLOURS},
    "s4d": {"scifar": S4_COLOURS},
    "s5": {"smnist": S5_DIGITS, "scifar": S5["image"]},
    "lru": {"scifar": LRU["image"]},
}


def use(config: ConfigDict, arch: str, task: str, recipes: Recipes = RECIPES) -> None:
    """Writes the published settings of an architecture on a task over its preset."""
    of_arch = choose("arch with a published recipe", arch, recipes)
    recipe = choose(f"task with a published recipe of arch {arch!r}", task, of_arch)
    config.steps, config.batch_size = recipe.steps, recipe.batch_size
    shared = dict(lr=recipe.lr, warmup=recipe.warmup, weight_decay=recipe.weight_decay)
    config.model.update(layers=recipe.layers, width=recipe.width, dropout=recipe.dropout)
    if isinstance(recipe, Transformer):
        config.model.update(
            norm="layernorm", mlp="gelu", mlp_width=recipe.mlp_width, pool=recipe.pool, norm_eps=1e-6, embed_init=1.0
        )
        heads = dict(n_heads=recipe.n_heads, head_dim=recipe.head_dim)
        config.model.update({arch: heads if arch == "attention" else heads | BASELINES[arch](task)})
        if recipe.learned:
            config.model.update(position="learned", learned=dict(max_len=recipe.learned))
        else:
            config.model.update(position="sinusoidal", sinusoidal=dict(amplitude=1.0))
        config.optim.update(schedule=recipe.schedule, b2=0.98, eps=1e-9, clip=recipe.clip, **shared)
    else:
        last = recipe.final_norm and recipe.norm_order == "pre"
        config.model.update(mlp="none", norm=recipe.norm, norm_order=recipe.norm_order, final_norm=last)
        config.model.update(pool=recipe.pool, causal=config.model.causal or recipe.forward)
        if recipe.norm == "batchnorm":
            config.model.batchnorm = dict(momentum=recipe.momentum)
        config.model[arch] = dict(recipe.mixer)
        config.optim.update(schedule="cosine", b2=0.999, clip=0.0, ssm_lr=recipe.ssm_lr / recipe.lr, **shared)
        config.optim.groups = tuple((rf"stack/.*/mixer/{name}", group) for name, group in recipe.groups.items())
