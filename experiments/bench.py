"""Measures Longview itself.

    python -m experiments.bench loop      share of training's wall time that is not the compiled step
    python -m experiments.bench startup   seconds to the first step, at the first and at the second start
    python -m experiments.bench attention time and memory of attention beside its peers
    python -m experiments.bench scan      the same of state spaces: scans, Mamba-2's products, long convolutions
    python -m experiments.bench state     the same of linear attention's kernels on a GPU, each beside the plain one
    python -m experiments.bench kernels   the last three, one after another
    python -m experiments.bench step      time and memory of a training step, in several forms and beside a peer
    python -m experiments.bench profile   where the time of a training step goes, by module and pass
    python -m experiments.bench decode    time to the first token and for each one after it, beside its peers
    python -m experiments.bench determinism   whether a run has the same bits again, and when killed and resumed
    python -m experiments.bench features  how far random features are from softmax, by their number
    python -m experiments.bench pods      whether every pod config fits its machine, and its step on paper
    python -m experiments.bench scaling   time and memory of a layer of every mixer, by length, in --minutes

loop, startup, profile and determinism take --config=FILE, which may be repeated (default: the quickstart's
architectures; for determinism nine of width 128 in bfloat16, or --archs=gla,kda), and --config.KEY=VALUE; all take
--out=FILE, where rows go as JSON lines, and for all but the first two a table beside them, with the ending md; for
scaling a picture too, with the ending png.
Of attention, scan, state, step and decode --only='case=fire;n=8192' measures a part, by what names its rows, which take
their places among those that are in --out. Where bits differ, or a pod config does not fit, the exit code is 1. Call
scaling or pods again with the same --out to take it up where it stopped; with --mixed, after the code has changed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import jax
from absl import flags

from experiments.measurements import (
    attention_speed,
    decode_speed,
    determinism,
    features,
    overhead,
    part,
    pods,
    scaling,
    scan_speed,
    startup,
    state_speed,
    step_profile,
    step_speed,
)
from experiments.running import folders
from experiments.running.runs import read_value
from experiments.tables import scaling as growth
from experiments.tables.definitions import TABLES
from model.errors import UserError, choose
from model.settings import LARGEST, LONGEST, Count, Name, Positive, within
from train import cli
from train.revision import revision
from train.workdir import write_text

CONFIG = flags.DEFINE_multi_string("config", [], "Config file, with its argument if any; may be repeated.")
STEPS = cli.flag("steps", Annotated[int, within(2, LARGEST)], 500, "loop: steps in a round.")
ROUNDS = cli.flag("rounds", Count, 3, "All that compare: times that each contender has its turn.")
ONLY = cli.flag("only", str, None, "KEY=VALUE,VALUE;KEY=VALUE: a part of what is compared, by the names of its rows.")
KILLS = cli.flag("kills", Count, 3, "determinism: times that a run is killed, and then resumed.")
ARCHS = cli.flag("archs", Name, None, "determinism: architectures, with commas between them; default one of each kind.")
MINUTES = cli.flag("minutes", Positive, 8.0, "scaling: time for all mixers together, compiling included.")
ASKED = cli.flag("mixers", Name, None, "scaling: the mixers, with commas between them; default all.")
LAST = cli.flag(
    "longest",
    Annotated[int, within(scaling.SHORTEST, LONGEST)],
    None,
    "scaling: tokens of the longest row; default 1,048,576, on a CPU 16,384.",
)
MIXED = flags.DEFINE_bool(
    "mixed", False, "scaling, pods: keep rows of other revisions of the code; the table names them."
)
OUT = cli.flag("out", Name, None, "File for the measurements, a line of JSON each.")
flags.declare_key_flag("override")


Measured = Iterator[tuple[dict, str]]  # a row, and the line that tells it


@dataclass(frozen=True)
class Bench:
    measure: Callable[[], Measured]
    reads: tuple[str, ...]  # of the flags
    table: Callable[[list[dict]], str] | None = None
    picture: Callable[[list[dict], Path], None] | None = None
    names: tuple[str, ...] = ()  # what names a row; one that is measured again takes its place
    kept: Callable[[Path, bool], list[dict]] | None = None  # what stays of a file's rows when it is taken up again


def bench_loop() -> Measured:
    for spec in specs():
        row = overhead.measure(spec, cli.overrides(), STEPS.value, ROUNDS.value)
        spread = f"{row['lowest']:.1%} to {row['highest']:.1%}"
        times = f"step {row['step_ms']:.2f} ms alone, {row['loop_ms']:.2f} ms in the loop"
        yield {"config": spec, **row}, f"{spec}: {row['overhead']:.1%} overhead ({spread}): {times}"


def bench_startup() -> Measured:
    for spec in specs():
        row = startup.measure(spec, {key: read_value(text) for key, text in cli.overrides()})
        times = f"first {row['first_s']:.1f} s, second {row['second_s']:.1f} s, ratio {row['ratio']:.2f}"
        yield {"config": spec, **row}, f"{spec}: {times}"


def bench_profile() -> Measured:
    step_profile.name_launches()
    for spec in specs():
        for row in step_profile.measure(spec, cli.overrides()):
            yield {"config": spec, **row}, step_profile.SHEET.sentence({"config": spec, **row})


def bench_compared(bench: ModuleType) -> Measured:
    wanted = part.ALL if ONLY.value is None else part.read(ONLY.value, bench.SHEET.names, bench.settings())
    for row in bench.measure(ROUNDS.value, wanted):
        yield row, bench.SHEET.sentence(row)


def bench_kernels() -> Measured:
    for name in KERNELS:
        try:
            for row, text in BENCHES[name].measure():
                yield {"bench": name, **row}, text
        except UserError as error:  # what runs on other chips alone
            print(error)


def bench_determinism() -> Measured:
    if CONFIG.value and ARCHS.value:
        closest = determinism.specs(ARCHS.value)[0]
        raise UserError(
            f"--archs={ARCHS.value} and --config are given; allowed: one of them; closest: --config={closest}"
        )
    settings = {} if CONFIG.value else determinism.SETTINGS
    overrides = {**settings, **{key: read_value(text) for key, text in cli.overrides()}}
    for spec in CONFIG.value or determinism.specs(ARCHS.value):
        row = determinism.measure(spec, overrides, KILLS.value)
        yield row, determinism.sentence(row)


def bench_features() -> Measured:
    for row in features.measure():
        yield row, features.sentence(row)


def bench_pods() -> Measured:
    for row in pods.measure(rows_before("pods")):
        yield row, pods.sentence(row)


def bench_scaling() -> Measured:
    lengths, seconds = scaling.lengths(LAST.value), 60 * MINUTES.value
    for row in scaling.rows(scaling.asked(ASKED.value), lengths, seconds, rows_before("scaling")):
        yield row, scaling.sentence(row)


def kernels_table(rows: list[dict]) -> str:
    """The tables of those that have rows, one below another."""
    by_bench = {name: [row for row in rows if row["bench"] == name] for name in KERNELS}
    return "\n".join(BENCHES[name].table(own) for name, own in by_bench.items() if own)


def rows_before(name: str) -> list[dict]:
    """What stays of the rows in --out: of a bench that goes on where it stopped, and around a part."""
    if OUT.value and (kept := BENCHES[name].kept):
        return kept(Path(OUT.value), MIXED.value)
    if OUT.value and ONLY.value is not None:
        return part.rows_before(Path(OUT.value), {"bench": name, "device": provenance()["device"]})
    return []


def specs() -> list[str]:
    """The configs asked for, or the quickstart's architectures on its first task."""
    table = TABLES["quickstart"].runs("small")
    one_task = [run.config for run in table if run.labels["task"] == table[0].labels["task"]]
    return CONFIG.value or list(dict.fromkeys(one_task))


def compared(bench: ModuleType) -> Bench:
    return Bench(
        partial(bench_compared, bench), ("only", "rounds", "out"), bench.SHEET.table, names=tuple(bench.SHEET.names)
    )


KERNELS = ("attention", "scan", "state")
BENCHES = {
    "loop": Bench(bench_loop, ("config", "override", "steps", "rounds", "out")),
    "startup": Bench(bench_startup, ("config", "override", "out")),
    "profile": Bench(bench_profile, ("config", "override", "out"), step_profile.SHEET.table),
    "attention": compared(attention_speed),
    "scan": compared(scan_speed),
    "state": compared(state_speed),
    "step": compared(step_speed),
    "decode": compared(decode_speed),
    "kernels": Bench(bench_kernels, ("rounds", "out"), kernels_table),
    "determinism": Bench(bench_determinism, ("config", "override", "archs", "kills", "out"), determinism.SHEET.table),
    "features": Bench(bench_features, ("out",), features.table),
    "pods": Bench(bench_pods, ("mixed", "out"), pods.table, kept=pods.kept),
    "scaling": Bench(
        bench_scaling,
        ("minutes", "mixers", "longest", "mixed", "out"),
        growth.table,
        picture=growth.picture,
        kept=scaling.kept,
    ),
}


def refuse_unread(name: str) -> None:
    written = {flag: f"--{flag}" for bench in BENCHES.values() for flag in bench.reads} | {"override": "--config.KEY"}
    reads = BENCHES[name].reads
    for flag in written.keys() - reads:
        if flags.FLAGS[flag].present:
            allowed = ", ".join(written[flag] for flag in reads)
            raise UserError(f"bench {name} does not read {written[flag]}; allowed: {allowed}")


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        raise UserError(f"bench takes one measurement; choose from {', '.join(BENCHES)}")
    name, bench = argv[1], choose("measurement", argv[1], BENCHES)
    refuse_unread(name)
    out = Path(OUT.value) if OUT.value else None
    if out:
        if out.suffix in (".md", ".png"):
            closest = out.with_suffix(".jsonl")
            raise UserError(f"--out={out} is for rows, and {out.suffix} for what is made of them; closest: {closest}")
        folders.make(out.parent)
        if out.is_dir():
            raise UserError(f"--out={out} is a folder; give a file, such as {out / 'rows.jsonl'}")
        if out.exists() and not out.is_file():
            raise UserError(f"--out={out} is a device or a pipe, and rows replace the file; give a plain one")
        folders.check_writable(out)
    if name == "scaling":
        scaling.share_the_device()
    rows, nothing = rows_before(name), True
    for row, text in bench.measure():
        print(text, flush=True)
        row, nothing = {"bench": name, **provenance(), **row}, False
        if bench.names:
            part.put(rows, row, bench.names)
        else:
            rows.append(row)
        if out:  # row by row: what is measured stays, whatever happens to the next
            write_text(out, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
            if bench.table:
                write_text(out.with_suffix(".md"), bench.table(rows))
    if out and rows and bench.picture:
        bench.picture(rows, out.with_suffix(".png"))
    if ONLY.value is not None and nothing:
        raise UserError(f"--only={ONLY.value} leaves nothing to measure")
    return int(not all(row.get("identical", True) and row.get("fits", True) for row in rows))


def provenance() -> dict[str, str]:
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "revision": revision(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    cli.run(main)
