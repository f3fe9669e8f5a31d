"""Every knob that is not a mixer's, a position's or a task's own, with its default.

Three keys are choices: `model.mixers`, `model.position` and `data.task`. Each brings a section named after what was
chosen, filled with that choice's own defaults (`model.mamba.state`, `model.rope.theta`, `data.mqar.length`), so a
config states only what differs and a run's `config.json` holds only what it used.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.seed = 0  # of parameters, dropout and data order
    c.steps = 1000
    c.batch_size = 32  # sequences per step over all devices
    c.log_every = 10  # steps between lines in metrics.jsonl
    c.eval_every = 200  # 0: only at the end
    c.eval_batches = 8  # batches per evaluation; 0: the whole split, where it is finite
    c.test_lengths = ()  # also test at these lengths, after training
    c.checkpoint_every = 200  # and at every new best; 0: only at the end
    c.keep = 2  # newest checkpoints kept, besides the best
    c.best = "accuracy"  # validation metric that names the best checkpoint: accuracy or loss
    c.target = 0.0  # stop early once validation accuracy reaches this; 0: never
    c.nonfinite = "stop"  # on a non-finite loss: stop, skip (drop the update) or rollback (to the last checkpoint)
    c.max_rollbacks = 3
    c.tensorboard = False  # also write TensorBoard events beside metrics.jsonl
    # Keys that may change when a run is resumed; a change to any other is refused.
    c.resume_safe = (
        "steps",
        "log_every",
        "eval_every",
        "eval_batches",
        "checkpoint_every",
        "keep",
        "target",
        "nonfinite",
        "max_rollbacks",
        "tensorboard",
        "resume_safe",
    )

    c.model = ConfigDict()
    # stack: layers of mixers. seq2seq: a GRU reads, another writes and looks back; without mixers or positions, it has
    # of this section the width (half for each direction of the reader), the dropout and the dtype.
    c.model.kind = "stack"
    c.model.width = 64
    c.model.layers = 2
    c.model.mixers = ("attention",)  # cycled over the layers
    c.model.position = "none"
    c.model.causal = True
    c.model.norm = "rmsnorm"  # rmsnorm, layernorm
    c.model.norm_order = "pre"  # pre, post
    c.model.mlp = "swiglu"  # none, relu, gelu, swiglu
    c.model.mlp_width = 0  # 0: 4 x width; for swiglu 8/3 x width, rounded up to a multiple of 32
    c.model.dropout = 0.0
    c.model.tied = True  # one matrix embeds and unembeds
    c.model.pool = "mean"  # classification reads the mean, cls or last hidden vector
    c.model.scan = True  # one compiled layer, looped; False unrolls the loop: same parameters, same results
    c.model.remat = False  # recompute activations in the backward pass
    c.model.dtype = "float32"  # of activations; parameters, softmax and recurrent states stay float32

    c.optim = ConfigDict()
    c.optim.lr = 1e-3
    c.optim.schedule = "cosine"  # constant, cosine, rsqrt; each after a linear warm-up
    c.optim.warmup = 100  # steps
    c.optim.final_lr = 0.0  # cosine ends at this fraction of lr
    c.optim.weight_decay = 0.1
    c.optim.b1 = 0.9
    c.optim.b2 = 0.98
    c.optim.eps = 1e-8
    c.optim.clip = 1.0  # global norm; 0: off
    c.optim.accumulate = 1  # micro-batches per step
    c.optim.ssm_lr = 1.0  # factor on the learning rate of the parameters a mixer puts in its `ssm` group

    c.mesh = ConfigDict()
    c.mesh.data = -1  # -1: all devices the other axes leave over
    c.mesh.fsdp = 1
    c.mesh.tensor = 1
    c.mesh.sequence = 1
    c.mesh.expert = 1
    # Logical axis -> mesh axes; what is not named is replicated.
    c.mesh.rules = (
        ("batch", ("data", "fsdp")),
        ("length", ("sequence",)),
        ("embed", ("fsdp",)),
        ("heads", ("tensor",)),
        ("inner", ("tensor",)),
        ("mlp", ("tensor",)),
        ("vocab", ("tensor",)),
        ("experts", ("expert",)),
    )

    c.data = ConfigDict()
    c.data.task = "mqar"
    c.data.seed = 0  # of the examples themselves, so that runs differing in `seed` are tested on the same ones
    return c
