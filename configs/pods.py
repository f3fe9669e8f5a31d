"""Language models for machines that train them: each size on each target, with a mesh on which it fits.

    python -m train --config=configs/pods.py:arch=mamba2,size=1b3,target=v5e-256 --compile_only --topology=v5e:16x16
    python -m train --config=configs/pods.py:arch=mamba2,size=1b3,target=v5e-256,path=texts --workdir=runs/pod \\
      --distributed

Takes `arch` (attention, mamba2, s4d, gated_deltanet, hybrid, moe), `size` (125m, 1b3, 7b; 8x1b3 for moe alone),
`target` (v5e-256, v5p-128, v6e-256, h100-64), `length`, up to 1,048,576, and `path`, a text to train on; without one
tokens are random, which take as long as any others. Feeds `make pods`, whose table has the chip-hours
(experiments/results/bench_pods.md). A v5p-128 is 64 chips: Google counts their cores.

Sizes are parameters with a vocabulary of 50,304, embeddings tied, within 4 % of their names; 8x1b3 is the 1.3B model
with eight MLPs in the place of one, of which a token goes through two. Steps are those of 20 tokens a parameter.
"""

from ml_collections import ConfigDict

from configs import archs, base
from configs.argument import parse
from model.errors import UserError, choose

VOCAB = 50_304
SHAPES = {"125m": dict(width=768, layers=12), "1b3": dict(width=2048, layers=24), "7b": dict(width=4096, layers=32)}
# Width of the MLPs, or for those without any the number of layers.
MATCHED = {
    "attention": {"125m": 2048, "1b3": 5504, "7b": 13_824},
    "s4d": {"125m": 2560, "1b3": 6720, "7b": 14_464},
    "gated_deltanet": {"125m": 1024, "1b3": 2816, "7b": 6336},
    "hybrid": {"125m": 1632, "1b3": 4288, "7b": 9728},
    "mamba2": {"125m": 24, "1b3": 48, "7b": 62},
}
HEAD = {"125m": 64, "1b3": 128, "7b": 128}  # channels
PARAMS = {"125m": 125e6, "1b3": 1.3e9, "7b": 7e9, "8x1b3": 7e9}
RATES = {"125m": 6e-4, "1b3": 3e-4, "7b": 3e-4, "8x1b3": 3e-4}
TARGETS = {"v5e-256": "v5e:16x16", "v5p-128": "v5p:4x4x4", "v6e-256": "v6e:16x16", "h100-64": "h100:64"}
CHIPS = {"v5e-256": 256, "v5p-128": 64, "v6e-256": 256, "h100-64": 64}
TOKENS = 8192  # of a step on a chip, if rows are no longer
TENSOR = {"v5p-128": 2}  # of the models of 7B: on paper as fast as fsdp alone
LONG = 65_536  # from here on the length is shared out, in stretches of so many tokens:
STRETCH = {"v5e-256": 4096, "v6e-256": 8192}  # of the models of 7B
USUAL_STRETCH = 16_384
LONGEST = 2**20


def get_config(argument: str = "") -> ConfigDict:
    arg = parse(argument, arch="attention", size="1b3", target="v5e-256", length=8192, path="")
    choose("target", arg.target, TARGETS)
    if arg.arch == "moe":
        choose("size of moe", arg.size, {"8x1b3"})
    elif arg.size == "8x1b3":
        raise UserError("size 8x1b3 is of arch 'moe' alone; closest: 1b3")
    if not 128 <= arg.length <= LONGEST or arg.length & (arg.length - 1):
        near = min((2**n for n in range(7, 21)), key=lambda power: abs(power - arg.length))
        raise UserError(f"length is {arg.length}; it takes a power of two from 128 to {LONGEST}; closest: {near}")
    c = base.get_config()
    use(c, arg.arch, "1b3" if arg.arch == "moe" else arg.size)
    c.model.vocab_size, c.model.dtype, c.model.kept, c.model.scan = VOCAB, "bfloat16", "nothing", True
    lay_out(c, arg.size, arg.target, arg.length)
    if arg.path:
        c.data.task, c.data.text = "text", dict(path=arg.path, length=arg.length)
    else:
        c.data.task, c.data.noise = "noise", dict(length=arg.length, vocab_size=VOCAB)
    c.steps = max(int(20 * PARAMS[arg.size] / (c.batch_size * arg.length)), 100)
    c.optim.update(dict(lr=RATES[arg.size], warmup=min(2000, c.steps // 10), final_lr=0.1, b2=0.95))
    c.best, c.eval_every, c.checkpoint_every, c.eval_batches = "loss", 1000, 500, 4
    return c


def use(c: ConfigDict, arch: str, size: str) -> None:
    """Writes an architecture of a size into the model section."""
    shape = choose("size", size, SHAPES)
    c.model.update(shape)
    heads = shape["width"] // HEAD[size]
    attention = dict(n_heads=heads, n_kv_heads=8 if size == "7b" else 0)
    mamba2 = dict(state=128, n_groups=8 if size == "7b" else 1)
    mixer = "attention" if arch == "moe" else arch
    matched = choose("arch", mixer, MATCHED)[size]
    if arch == "hybrid":  # three of Mamba-2 and one of attention in turn, which takes its positions from them
        c.model.update(dict(mixers=("mamba2", "mamba2", "attention", "mamba2"), attention=attention, mamba2=mamba2))
    else:
        archs.use(c, mixer)
    if mixer == "attention":
        c.model.attention = attention
    if mixer == "mamba2":
        c.model.mamba2 = mamba2
        c.model.layers = matched
    else:
        c.model.mlp_width = matched
    if mixer == "gated_deltanet":
        c.model.gated_deltanet = dict(head_dim=HEAD[size])
    if arch == "moe":
        c.model.mlp = "experts"
        c.model.experts = dict(n_experts=8, top_k=2, capacity=1.25)


def lay_out(c: ConfigDict, size: str, target: str, length: int) -> None:
    """The mesh, and how many rows a step has.

    Small models go whole to every chip (data). Larger ones are shared out over all of them (fsdp); on GPUs over those
    of a node, and nodes have copies (data). Experts lie on eight. Long rows are cut into stretches (sequence).
    """
    chips, gpus = CHIPS[target], target.startswith("h100")
    mesh = dict(data=1, fsdp=1, tensor=1, sequence=1, expert=1)
    if size == "8x1b3":
        mesh["expert"] = 8
    if size == "7b":
        mesh["tensor"] = TENSOR.get(target, 1)
    if length >= LONG:
        stretch = STRETCH.get(target, USUAL_STRETCH) if size == "7b" else USUAL_STRETCH
        mesh["sequence"] = min(chips // (mesh["expert"] * mesh["tensor"]), length // stretch)
    rest = chips // (mesh["sequence"] * mesh["expert"] * mesh["tensor"])
    copies = rest if size == "125m" else min(8, rest) if gpus else 1
    mesh["data"], mesh["fsdp"] = copies, rest // copies
    c.mesh.update(mesh)
    rows = copies * mesh["fsdp"] * mesh["expert"]
    c.batch_size = max(rows, chips * TOKENS // length)
    if mesh["sequence"] > 1:  # parameters lie on the devices of a row's stretches too
        c.mesh.rules = tuple((name, (*axes, "sequence") if name == "embed" else axes) for name, axes in c.mesh.rules)
