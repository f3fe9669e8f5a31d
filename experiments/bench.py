"""Measures Longview itself.

    python -m experiments.bench loop      share of training's wall time that is not the compiled step
    python -m experiments.bench startup   seconds to the first step, at the first and at the second start

Both take --config=FILE (default: the quickstart's architectures), --config.KEY=VALUE and --out=FILE.
"""

import json
from collections.abc import Callable
from pathlib import Path

from absl import flags

from experiments import overhead, startup
from experiments.runs import read_value
from experiments.tables import TABLES
from model.errors import UserError, choose
from train import cli

CONFIG = flags.DEFINE_multi_string("config", [], "Config file, with its argument if any; may be repeated.")
STEPS = flags.DEFINE_integer("steps", 500, "loop: steps in a round.")
ROUNDS = flags.DEFINE_integer("rounds", 3, "loop: times that the loop and the step alone take turns.")
OUT = flags.DEFINE_string("out", None, "File for the measurements, a line of JSON each.")


def bench_loop(spec: str) -> tuple[dict, str]:
    row = overhead.measure(spec, cli.overrides(), STEPS.value, ROUNDS.value)
    spread = f"{row['lowest']:.1%} to {row['highest']:.1%}"
    times = f"step {row['step_ms']:.2f} ms alone, {row['loop_ms']:.2f} ms in the loop"
    return row, f"{row['overhead']:.1%} overhead ({spread}): {times}"


def bench_startup(spec: str) -> tuple[dict, str]:
    row = startup.measure(spec, {key: read_value(text) for key, text in cli.overrides()})
    return row, f"first {row['first_s']:.1f} s, second {row['second_s']:.1f} s, ratio {row['ratio']:.2f}"


BENCHES: dict[str, Callable[[str], tuple[dict, str]]] = {"loop": bench_loop, "startup": bench_startup}


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        raise UserError(f"bench takes one measurement; choose from {', '.join(BENCHES)}")
    bench = choose("measurement", argv[1], BENCHES)
    table = TABLES["quickstart"].runs("small")
    one_task = [run.config for run in table if run.labels["task"] == table[0].labels["task"]]
    lines = []
    for spec in CONFIG.value or dict.fromkeys(one_task):
        row, text = bench(spec)
        print(f"{spec}: {text}", flush=True)
        lines.append(json.dumps({"bench": argv[1], "config": spec, **row}, sort_keys=True))
    if OUT.value:
        Path(OUT.value).parent.mkdir(parents=True, exist_ok=True)
        Path(OUT.value).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    cli.run(main)
