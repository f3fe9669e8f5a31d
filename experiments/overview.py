"""What each architecture can do, beside what length costs it: one table over those that there are; runs nothing.

    python -m experiments.overview --dir=experiments/results
    python -m experiments.overview --dir=experiments/results --mixers

The folder has that of a table under its name, as `reproduce TABLE --out=FOLDER/TABLE` leaves it, and the rows of
`bench scaling --out=FOLDER/bench_scaling.jsonl`. Prints Markdown: test accuracy in percent, mean and spread over seeds,
of the settings that validation chose; and milliseconds of a training step of one layer. With --mixers it is all mixers:
which way each reads, the powers of the length by which its time and memory grow (a logarithm counts as none), the bytes
of state that a layer of width 256 in bfloat16 carries along for a row after so many tokens, and those milliseconds.
"""

from pathlib import Path

from absl import flags

from experiments.tables.overview import overview
from experiments.tables.zoo import zoo
from model.errors import UserError
from model.settings import Name
from train import cli

DIR = cli.flag("dir", Name, None, "A folder of tables.")
MIXERS = flags.DEFINE_bool("mixers", False, "All mixers, in the place of what architectures can do.")


def main(argv: list[str]) -> None:
    cli.refuse_arguments(argv, "overview", "one flag, --dir=FOLDER")
    if DIR.value is None:
        raise UserError("give --dir=FOLDER, one of tables; closest: --dir=experiments/results")
    if not Path(DIR.value).is_dir():
        raise UserError(f"--dir={DIR.value} is no folder; closest: --dir=experiments/results")
    print((zoo if MIXERS.value else overview)(Path(DIR.value)), end="")


if __name__ == "__main__":
    cli.run(main)
