"""Asks a run's checkpoint something; the run is only read, and may still be going.

    python -m eval --workdir=runs/a [--split=test] [--step=latest] [--config.data.mqar.length=128 ...]
    python -m eval --workdir=runs/a --suite=lengths [--split=test] [--config.test_lengths=128,256,512]
    python -m eval --workdir=runs/a --suite=generate --prompt="Once upon a" [--tokens=200] [--temperature=0.8]
    python -m eval --workdir=runs/a --suite=attention [--examples=8] [--prompt="1 9 2 10 1"]
    python -m eval --workdir=runs/a --suite=reach
    python -m eval --workdir=runs/a --suite=context [--targets=1024] [--config.test_lengths=2048]
    python -m eval --workdir=runs/a --suite=stream [--config.stream.length=100000]
    python -m eval --workdir=runs/a --suite=export --out=DIR [--family=llama]
    python -m eval --weights=DIR --suite=generate --prompt="1 306 471"

Weights are a folder of safetensors with the config.json that transformers reads; export writes one.

Started on every host with `--distributed`, accuracy is measured by all of them together.

Overrides change what the model is asked, not what it is: `--config.eval_batches=0` takes all of a finite
split, `--config.batch_size` and `--config.mesh.fsdp` fit it to this machine.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from absl import flags

from data import SPLITS
from eval.imported import imported
from eval.restore import restore
from eval.sample import Sampling
from eval.suites import SHARED, SMALLER, SUITES
from model.errors import UserError, made_smaller_by
from model.settings import Count, Name, Seed, Whole, section
from model.weights import FAMILIES
from train import cli, hosts
from train.revision import source_digest

SAMPLING = section(Sampling)
WORKDIR = cli.flag("workdir", Name, None, "The run's folder.")
SUITE = cli.flag("suite", Literal[*SUITES], "accuracy", f"What to ask: {', '.join(SUITES)}.")
WEIGHTS = cli.flag("weights", Name, None, "A folder of safetensors, in place of a run.")
STEP = cli.flag("step", Literal["best", "latest"] | Whole, "latest", "The checkpoint: a step, best or latest.")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "accuracy: join the other hosts of a pod or cluster job.")
flags.declare_key_flag("override")
OPTIONS = (
    cli.flag("split", Literal[*SPLITS], "test", "train, validation or test."),
    cli.flag("targets", Count, 1024, "context: bytes to predict, spread over the split."),
    cli.flag("examples", Count, 1, "attention: how many, from the first of the split on."),
    flags.DEFINE_string(
        "prompt",
        "",
        "generate, attention: text, or token ids with blanks between them; "
        "without it a line of text starts, or the split is looked at.",
    ),
    cli.flag("tokens", Count, 200, "generate: how many."),
    cli.flag(
        "temperature", SAMPLING["temperature"].type, 1.0, "generate: below 1 sharper, above 1 flatter, 0 the likeliest."
    ),
    cli.flag("top_k", SAMPLING["top_k"].type, 0, "generate: draw from the k likeliest; 0: from all."),
    cli.flag("top_p", SAMPLING["top_p"].type, 1.0, "generate: draw from the fewest likeliest that reach p; 1: all."),
    cli.flag("seed", Seed, 0, "generate: of the draws."),
    flags.DEFINE_string("out", "", "export: the folder to write."),
    cli.flag("family", Literal["", *FAMILIES], "", "export: the model_type to write; without it the first that can."),
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; flags begin with --")
    if not (WORKDIR.value or WEIGHTS.value):
        raise UserError("--workdir is missing; e.g. python -m eval --workdir=runs/debug")
    if WEIGHTS.value and (WORKDIR.value or STEP.present):
        other = "--workdir" if WORKDIR.value else "--step"
        raise UserError(f"--weights is given, and {other}, which is of a run; allowed: one of the two")
    suite = SUITES[SUITE.value]
    taken = options(suite)
    if DISTRIBUTED.value and SUITE.value not in SHARED:
        raise UserError(f"suite {SUITE.value} does not take --distributed; allowed with it: {', '.join(SHARED)}")
    with hosts.joined(DISTRIBUTED.value):
        asked = {"workdir": WORKDIR.value, "weights": WEIGHTS.value, "suite": SUITE.value, "step": STEP.value}
        asked |= {**taken, **dict(cli.overrides())}
        hosts.same(lambda: {**asked, "jax": jax.__version__, "code": source_digest()})
        cli.use_compilation_cache()
        with made_smaller_by(SMALLER[SUITE.value]):
            if WEIGHTS.value:
                suite(imported(WEIGHTS.value, cli.overrides()), **taken)
            else:
                suite(restore(WORKDIR.value, str(STEP.value), cli.overrides()), **taken)


def options(suite: Callable[..., None]) -> dict[str, Any]:
    """The flags that a suite takes; one that only another takes must not be given."""
    takes = [name for name, p in inspect.signature(suite).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for flag in OPTIONS:
        if flag.present and flag.name not in takes:
            allowed = ", ".join(f"--{name}" for name in takes)
            raise UserError(f"suite {SUITE.value} does not take --{flag.name}; allowed: {allowed}")
    return {flag.name: flag.value for flag in OPTIONS if flag.name in takes}


if __name__ == "__main__":
    cli.run(main)
