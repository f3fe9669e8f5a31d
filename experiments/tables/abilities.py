"""What an architecture can do at all: MAD's six abilities, tracking a state, remembering over a distance."""

from itertools import product

from configs import mad as mad_config
from experiments.running.runs import RunSpec
from experiments.tables.table import Table, over_arguments, over_grid
from model.errors import choose

TRACKERS = ("attention", "s4d", "s5", "lru", "mamba", "mamba2", "rglru", "rwkv6", "lstm", "gru", "hybrid")


def mad_settings(task: str, scale: str) -> list[tuple[str, int | float | str]]:
    """The baseline of a task, and each change to one field of it; the small scale has two changes, the smoke none."""
    fields = mad_config.TASKS[task]
    if scale == "paper":
        changes = {field: values[1:] for field, values in fields.items()}
    else:
        changes = {} if scale == "smoke" else {"vocab_size": fields["vocab_size"][-1:], "length": fields["length"][1:2]}
    return [("", ""), *((field, value) for field, values in changes.items() for value in values)]


def mad(scale: str) -> list[RunSpec]:
    """MAD's grid: every task in every setting, at every rate and decay."""
    archs, rates, decays, seeds = choose(
        "scale",
        scale,
        {
            "small": (("attention", "s4d", "rglru", "rwkv6", "mamba", "mamba2", "hybrid"), (5e-4, 2e-3), (0.0,), 1),
            "smoke": (("attention", "mamba"), (3e-3,), (0.0,), 1),
            "paper": (
                ("attention", "mamba", "hybrid"),
                (1e-4, 5e-4, 1e-3),
                (0.0, 0.1),
                1,
            ),
        },
    )
    return [
        RunSpec(
            f"configs/mad.py:task={task},arch={arch},size={scale}" + (f",change={field},to={value}" if field else ""),
            {
                "optim.lr": lr,
                "optim.final_lr": mad_config.FINAL / lr,
                "optim.weight_decay": decay,
                "seed": seed,
            },
            {"arch": arch, "task": task, "setting": f"{field} {value}".strip() or "baseline", "lr": lr, "decay": decay},
        )
        for arch, task in product(archs, mad_config.TASKS)
        for field, value in mad_settings(task, scale)
        for lr, decay, seed in product(rates, decays, range(seeds))
    ]


def tracking(scale: str) -> list[RunSpec]:
    tasks, seeds = choose("scale", scale, {"small": (("parity", "z60", "s3", "a5", "s5"), 2), "smoke": (("s3",), 1)})
    return over_arguments("tracking", scale, seeds, task=tasks, arch=TRACKERS)


def distance(scale: str) -> list[RunSpec]:
    """Each architecture before and after training."""
    archs, seeds = ("rnn", "lstm", "gru", "attention", "s4", "mamba"), choose("scale", scale, {"small": 3, "smoke": 1})
    return [
        RunSpec(
            f"configs/distance.py:arch={arch},trained={trained},size={scale}",
            {"seed": seed},
            {"arch": arch, "trained": trained},
        )
        for trained, arch, seed in product(("no", "yes"), archs, range(seeds))
    ]


def based_recall(scale: str) -> list[RunSpec]:
    """Based's mix of lengths and pairs, in several widths and at several rates."""
    archs = ("attention", "s4d", "rwkv6", "rglru", "mamba", "mamba2")
    widths, rates, seeds = choose(
        "scale",
        scale,
        {
            "small": ((64, 128), (1e-3, 3e-3), 2),
            "smoke": ((16,), (4e-3,), 1),
            "paper": ((32, 64, 128, 256), (1e-3, 3.2e-3, 1e-2, 3.2e-2), 1),
        },
    )
    return over_grid(over_arguments("based_recall", scale, seeds, arch=archs, width=widths), {"optim.lr": rates})


BASED_RECALL = (
    "Published, of mixers behind a short convolution, read off by eye at 100,000 numbers of state: DeltaNet and gated"
    " DeltaNet 99, RWKV-7 91, Mamba 85, Mamba-2 84, a sliding window 65, H3 25 (the figure in Zoology's repository,"
    " https://github.com/HazyResearch/zoology)."
)

TABLES = [
    Table(
        name="mad",
        description="MAD's six tasks, each the mean over its settings",
        runs=mad,
        scales=("small", "smoke", "paper"),
        by=("arch",),
        across="task",
        metric="test/accuracy",
        tuned=("lr", "decay"),
        averaged=("setting",),
    ),
    Table(
        name="tracking",
        description="parity, sums and products of permutations, token by token, trained on short rows, tested on long",
        runs=tracking,
        scales=("small", "smoke"),
        by=("task", "arch"),
        across="length",
        metric="test/accuracy",
        unpublished="arXiv:2404.08819 trains deeper models until one can, and tells how many layers each length takes",
    ),
    Table(
        name="distance",
        description="the first token of a row, asked for at its end, trained at all distances of the training length",
        runs=distance,
        scales=("small", "smoke"),
        by=("arch", "trained"),
        across="length",
        metric="test/accuracy",
        also={"test/reach": lambda scale: {}},
        unpublished="a claim of textbooks, not of one paper",
    ),
    Table(
        name="based_recall",
        description="associative recall of mixed lengths and numbers of pairs, tested with a quarter of a row pairs",
        runs=based_recall,
        scales=("small", "smoke", "paper"),
        by=("arch", "width"),
        across="length",
        metric="test/accuracy",
        tuned=("lr",),
        against="state_bytes",
        note=BASED_RECALL,
    ),
]
