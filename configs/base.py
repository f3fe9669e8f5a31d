"""Every knob that no mixer, position, task or objective has for itself: what it may be, its default, what it does.

Some keys are choices: `model.kind`, `model.mixers`, `model.encoder_mixers`, `model.position`, `model.norm`,
`model.mlp`, `data.task` and `objective.kind`. Each brings a section named after what was chosen, filled with that
choice's own defaults (`model.mamba.state`, `model.rope.theta`, `data.mqar.length`, `objective.masked.rate`), so a
config states only what differs and a run's `config.json` holds only what it used.

Layers that share a mixer may differ: a name of one's own in `model.mixers` has a section that says which mixer it is
(`model.near.mixer`), perhaps a position of its own (`model.near.position`, `model.near.rope.theta`), and whatever
settings of that mixer differ (`model.near.window`).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from ml_collections import ConfigDict

from data import TASKS
from model.block import NORM_ORDERS
from model.build import DTYPES, KINDS
from model.layers import STREAM_NORMS
from model.mixers import MIXERS
from model.mlps import MLPS
from model.positions import POSITIONS
from model.settings import (
    Count,
    Dim,
    Fraction,
    Length,
    Name,
    NotNegative,
    Positive,
    Seed,
    Whole,
    at_least,
    below,
    defaults,
    section,
    within,
)
from model.stack import KEPT
from train.objective import Smoothing
from train.objectives import OBJECTIVES


@dataclass(frozen=True)
class Model:
    # stack: layers of mixers, which read a pair of rows as one. towers: the same layers over each row of a pair.
    # encoder_decoder: bidirectional layers read a source, others write its target and attend to it. seq2seq: a GRU or
    # LSTM reads, another writes and looks back; without mixers or positions, it has of this section the width (half for
    # each direction of the reader), the dropout and the dtype.
    kind: Literal[*KINDS] = "stack"
    vocab_size: Literal[0] | Dim = 0  # 0: the task's; else no less than that
    width: Dim = 64
    layers: Dim = 2
    mixers: tuple[Literal[*MIXERS], ...] = ("attention",)  # cycled over the layers
    encoder_layers: Literal[0] | Dim = 0  # of an encoder; 0: as many as layers
    encoder_mixers: tuple[Literal[*MIXERS], ...] = ()  # cycled over those; (): the same as mixers
    position: Literal[*POSITIONS] = "none"
    causal: bool = True
    norm: Literal[*STREAM_NORMS] = "rmsnorm"  # batchnorm: over a batch's tokens, in classifiers and encoders
    norm_eps: Positive = 1e-5
    final_norm: bool = True  # between the last layer and the head
    norm_order: Literal[*NORM_ORDERS] = (
        "pre"  # before each sub-layer, after the residual sum, before and after, or nowhere
    )
    residual: bool = True  # False: a sub-layer's output takes the place of its input
    branch_scale: Positive = 1.0  # factor on what each sub-layer adds
    parallel: bool = False  # mixer and MLP read the same vectors, and both are added
    mlp: Literal[*MLPS] = "swiglu"
    mlp_width: Literal[0] | Dim = 0  # 0: 4 x width; if gated 8/3 x width, rounded up to a multiple
    mlp_multiple: Dim = 32  # 256 in LLaMA
    mlp_bias: bool | None = None  # on its linear maps; None: only if not gated
    depth_init: bool = False  # kernels that end a sub-layer are divided by the root of their number (GPT-2)
    dropout: Annotated[float, at_least(0), below(1)] = 0.0
    tied: bool = True  # one matrix embeds and unembeds
    patch: Dim = 16  # pixels in a side of the squares that images are cut into
    embed_init: Positive = 0.02  # standard deviation of the embeddings at the start
    embed_scale: Positive = 1.0  # factor on the embeddings: the root of the width in Gemma
    embed_norm: Literal["none", "before", "after"] = "none"  # adding positions: BLOOM's, BERT's
    head_map: Literal["none", "relu", "gelu", "exact_gelu"] = "none"  # a linear map and this, then the final norm: BERT
    unembed_bias: bool = False  # added to the logits
    logit_scale: Positive = 1.0  # factor on the logits
    logit_cap: NotNegative = 0.0  # keeps logits within this by a tanh; 0: off
    pool: Literal["mean", "cls", "last"] = "mean"  # the hidden vector that classification reads
    # One compiled layer, looped; False unrolls the loop: same parameters, same results. None: by depth and platform.
    scan: bool | None = None
    # Of each layer for the backward pass, which computes the rest anew (remat). matmuls: products with parameters, and
    # what kernels make; nothing: the layer's inputs alone.
    kept: Literal[*KEPT] = "all"
    dtype: Literal[*DTYPES] = "float32"  # of activations; parameters, softmax and recurrent states stay float32


@dataclass(frozen=True)
class Init:
    # A run's folder, or one of safetensors with the config.json that transformers reads; "": all parameters are fresh.
    path: str = ""
    step: Literal["best", "latest"] | Whole = "latest"  # of a run
    # Regular expressions of whole parameter paths, as `classes/.*`: what stays fresh here, or is left there.
    fresh: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Optim:
    lr: NotNegative = 1e-3
    schedule: Literal["constant", "cosine", "rsqrt"] = "cosine"  # each after a linear warm-up
    warmup: Whole = 100  # steps
    final_lr: Fraction = 0.0  # cosine ends at this fraction of lr
    weight_decay: NotNegative = 0.1
    b1: Annotated[float, at_least(0), below(1)] = 0.9
    b2: Annotated[float, at_least(0), below(1)] = 0.98
    eps: Positive = 1e-8
    clip: NotNegative = 1.0  # global norm; 0: off
    accumulate: Count = 1  # micro-batches per step
    # Regular expressions of whole parameter paths that are not trained; a batch norm still norms by the batch then.
    frozen: tuple[Name, ...] = ()
    ssm_lr: NotNegative = 1.0  # factor on the learning rate of the parameters a mixer puts in its `ssm` group
    # Regular expressions of whole parameter paths, and the group they are in whatever their mixer says.
    groups: tuple[tuple[Name, Literal["decay", "no_decay", "ssm"]], ...] = ()


Devices = Literal[-1] | Count  # -1: all that the other axes leave over
Axis = Literal["data", "fsdp", "tensor", "sequence", "expert"]
Logical = Literal["batch", "length", "embed", "heads", "inner", "mlp", "vocab", "experts"]


@dataclass(frozen=True)
class Mesh:
    data: Devices = -1
    fsdp: Devices = 1
    tensor: Devices = 1
    sequence: Devices = 1
    expert: Devices = 1
    # Logical axis -> mesh axes; what is not named is replicated.
    rules: tuple[tuple[Logical, tuple[Axis, ...]], ...] = (
        ("batch", ("data", "fsdp", "expert")),
        ("length", ("sequence",)),
        ("embed", ("fsdp",)),
        ("heads", ("tensor",)),
        ("inner", ("tensor",)),
        ("mlp", ("tensor",)),
        ("vocab", ("tensor",)),
        ("experts", ("expert",)),
    )


@dataclass(frozen=True)
class Data:
    task: Literal[*TASKS] = "mqar"
    seed: Seed = 0  # of the examples themselves, so that runs differing in `seed` are tested on the same ones


@dataclass(frozen=True)
class Objective:
    kind: Literal[*OBJECTIVES] = "task"
    label_smoothing: Smoothing = 0.0  # share of a target spread over all answers, in training


@dataclass(frozen=True)
class Stream:
    # After training, bytes of the test split that are also read as one document, the state carried on; 0: none.
    length: Whole = 0
    chunk: Count = 512  # bytes at a time: speed, never meaning
    recompute: Whole = 0  # no state: each byte from a row of so many bytes before it, read anew; 0: the state


@dataclass(frozen=True)
class Watchdog:
    # A step, or a wait for its batches, that takes so many times the median of the latest ends the process with code 75
    # and all stacks on record: something hangs, and started again the run resumes. 0: never.
    factor: NotNegative = 20.0
    seconds: Positive = 300.0  # that it has at least; evaluating, saving, restoring and compiling have 20 times as long


@dataclass(frozen=True)
class Base:
    seed: Seed = 0  # of parameters, dropout and data order
    steps: Count = 1000
    batch_size: Count = 32  # sequences per step over all devices
    log_every: Count = 10  # steps between lines in metrics.jsonl
    eval_every: Whole = 200  # 0: only at the end
    eval_batches: Whole = 8  # batches per evaluation; 0: the whole split, where it is finite
    test_lengths: tuple[Length, ...] = ()  # also test at these lengths, after training
    checkpoint_every: Whole = 200  # and at every new best; 0: only at the end
    keep: Count = 2  # newest checkpoints kept, besides the best
    best: Literal["accuracy", "loss"] = "accuracy"  # validation metric that names the best checkpoint
    # What the test score is of: the last step, or the first with the best validation score, which is then always saved.
    test_at: Literal["last", "best"] = "last"
    target: Fraction = 0.0  # stop early once validation accuracy reaches this; 0: never
    # On a non-finite loss: stop, skip (drop the update) or rollback: to the last checkpoint, be it one that a stop
    # left, so that here alone a run that was stopped may differ from one that was not.
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    max_rollbacks: Whole = 3
    # Steps that the devices are given at once, where nothing is due in between; fewer take as long. 0: 10 on GPUs and
    # TPUs if steps are small, else 1. The same bits however they are grouped; another number may round otherwise.
    steps_per_dispatch: Annotated[int, within(0, 100)] = 0
    deterministic: bool = True  # the same bits every time, on GPUs too; False: their fastest kernels
    tensorboard: bool = False  # also write TensorBoard events beside metrics.jsonl
    # Keys that may change when a run is resumed; a change to any other is refused. `mesh.*` is all that begin so.
    # A result row lists the changes that were made.
    resume_safe: tuple[str, ...] = (
        "steps",
        "log_every",
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "keep",
        "test_at",
        "target",
        "nonfinite",
        "max_rollbacks",
        "tensorboard",
        "steps_per_dispatch",
        "mesh.*",
        "stream.*",
        "watchdog.*",
        "resume_safe",
    )
    model: Model = Model()
    init: Init = Init()
    optim: Optim = Optim()
    mesh: Mesh = Mesh()
    data: Data = Data()
    objective: Objective = Objective()
    stream: Stream = Stream()
    watchdog: Watchdog = Watchdog()


def get_config() -> ConfigDict:
    return ConfigDict(defaults(section(Base)))
