"""Does to runs what pods, disks and people do to them, hundreds of times, and tells what was survived.

    python -m tests.chaos [--quick] [--only=kills,bits] [--seed=0] [--out=experiments/results/chaos]

A try is survived if the run says what is wrong as it should, and in the end is the run that nothing has happened to:
the same losses to the bit and the same row. The seed decides at which steps and how; the moments between two steps are
the machine's. Rows go to OUT/rows.jsonl and the table to OUT/table.md, trial by trial. The exit code is 1 if anything
was not survived.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from absl import logging

from tests.chaos import alone, disks, files, ranks
from tests.chaos.place import Place, Trial
from train.revision import revision

TRIALS = {
    "kills": Trial("SIGKILL at random moments", 100, 10, alone.kills),
    "notices": Trial("SIGTERM and SIGINT", 20, 2, alone.notices),
    "preempted": Trial("ten notices in a run: under 3 % of its steps repeated", 10, 10, alone.preempted),
    "unannounced": Trial("ten kills: under 3 % beside the checkpoints' interval", 10, 10, alone.unannounced),
    "term one": Trial("SIGTERM to one of two ranks", 6, 1, ranks.signals(signal.SIGTERM, everyone=False)),
    "term all": Trial("SIGTERM to both ranks", 6, 1, ranks.signals(signal.SIGTERM, everyone=True)),
    "int one": Trial("SIGINT to one of two ranks", 6, 1, ranks.signals(signal.SIGINT, everyone=False)),
    "int all": Trial("SIGINT to both ranks", 6, 1, ranks.signals(signal.SIGINT, everyone=True)),
    "kill one": Trial("SIGKILL of one of two ranks", 10, 1, ranks.lost),
    "stopped": Trial("SIGSTOP, later SIGCONT", 6, 1, alone.stopped),
    "one stopped": Trial("SIGSTOP, later SIGCONT, of one of two ranks", 6, 1, ranks.paused),
    "one frozen": Trial("SIGSTOP of one of two ranks, for good", 4, 1, ranks.frozen),
    "stuck": Trial("a step that never ends", 6, 1, alone.stuck),
    "full checkpoints": Trial("a full disk for checkpoints", 10, 1, disks.full("checkpoints")),
    "full metrics": Trial("a full disk for the log and the small files", 10, 1, disks.full("metrics")),
    "full both": Trial("a full disk for all of it", 10, 1, disks.full("both")),
    "bits": Trial("a flipped bit in the newest checkpoint", 720, 72, files.checkpoints(files.bit)),
    "truncated": Trial("a file of the newest checkpoint cut short", 100, 10, files.checkpoints(files.cut)),
    "missing": Trial("files or folders of the newest checkpoint gone", 100, 10, files.checkpoints(files.take)),
    "swapped": Trial(
        "files of the newest checkpoint swapped, or taken from an older one", 100, 10, files.checkpoints(files.swap)
    ),
    "small files": Trial("a flipped bit in config.json and the like", 20, 2, files.small),
    "clocks": Trial("clocks set by hours, days and years", 12, 2, alone.clocks),
    "rivals": Trial("three trainers on one folder", 10, 1, alone.rivals),
    "meshes": Trial("resumed on another mesh", 20, 2, alone.meshes),
}


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    names = asked.only.split(",") if asked.only else list(TRIALS)
    if unknown := [name for name in names if name not in TRIALS]:
        print(f"error: unknown trial {unknown[0]!r}; choose from {', '.join(TRIALS)}", file=sys.stderr)
        return 2
    logging.set_verbosity(logging.ERROR)  # damage is what it is all about
    out, rows = Path(asked.out) if asked.out else None, []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        place = Place(Path(folder))
        for name in names:
            rows.append(row_of(name, place, asked.seed, asked.quick))
            print(sentence(rows[-1]), flush=True)
            if out:
                out.mkdir(parents=True, exist_ok=True)
                (out / "rows.jsonl").write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
                (out / "table.md").write_text(table(rows))
    print(table(rows))
    return int(any(row["survived"] < row["tried"] for row in rows))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about a tenth of the tries")
    parser.add_argument("--only", default="", help="trials, with commas between them")
    parser.add_argument("--seed", type=int, default=0, help="another one makes other tries")
    parser.add_argument("--out", default="", help="folder for the rows and the table")
    return parser.parse_args(argv)


def row_of(name: str, place: Place, seed: int, quick: bool) -> dict[str, Any]:
    """What became of a trial. A trial that breaks off has not survived the try it was at."""
    trial, began, outcomes = TRIALS[name], time.monotonic(), []
    place.notes = {}
    try:
        for outcome in trial.run(place, random.Random(f"{seed} {name}"), trial.quick if quick else trial.tries):
            outcomes.append(outcome)
    except Exception as error:
        outcomes.append(f"{type(error).__name__}: {error}")
    failures = [outcome for outcome in outcomes if outcome]
    return {
        "trial": name,
        "says": trial.says,
        "tried": len(outcomes),
        "survived": len(outcomes) - len(failures),
        "failures": failures[:10],
        "measured": place.notes,
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "revision": revision(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def sentence(row: dict[str, Any]) -> str:
    end = "".join(f"\n  {failure}" for failure in row["failures"])
    return f"{row['says']}: {row['survived']} of {row['tried']} survived, {row['seconds']:.0f} s{end}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line per trial."""
    lines = ["| what was done | tried | survived | measured | seconds |", "|---|---|---|---|---|"]
    for row in rows:
        found = ", ".join(f"{key} {told(value)}" for key, value in row["measured"].items())
        lines.append(f"| {row['says']} | {row['tried']} | {row['survived']} | {found} | {row['seconds']:.0f} |")
    total = [sum(row[key] for row in rows) for key in ("tried", "survived", "seconds")]
    return "\n".join([*lines, f"| all | {total[0]} | {total[1]} | | {total[2]:.0f} |"]) + "\n"


def told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
