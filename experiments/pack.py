"""Packs runs into files of bounded size, so that they can go on somewhere else, bit for bit; and unpacks them.

    python -m experiments.pack runs/lra --out=packs/lra [--size-mib=16] [--checkpoints=all]
    python -m experiments.pack packs/lra --unpack --out=runs/lra

A run's folder or a folder of runs goes in. Packed are their configs, logs and results, and of those that are not over,
or that others have yet to begin with, the newest checkpoint and the best; --checkpoints=all takes along those of all
finished runs. Then the command that made the folder goes on there. Every part is checked before anything is unpacked,
into a folder that must be new.
"""

from pathlib import Path
from typing import Annotated, Literal

from absl import flags

from experiments.running import packing
from model.errors import UserError
from model.settings import Name, within
from train import cli

OUT = cli.flag("out", Name, None, "Folder for the pack or, with --unpack, for the runs; it must be new.")
SIZE = cli.flag("size-mib", Annotated[int, within(1, 2**20)], 16, "Largest size of a file, in MiB.")
CHECKPOINTS = cli.flag("checkpoints", Literal["unfinished", "all"], "unfinished", "Of which runs: unfinished or all.")
UNPACK = flags.DEFINE_bool("unpack", False, "The folder given is a pack.")


def main(argv: list[str]) -> None:
    for word, _ in cli.overrides():
        raise UserError(f"unexpected argument --config.{word}; pack takes a folder and its own flags")
    if len(argv) != 2 or not OUT.value:
        raise UserError("pack takes one folder and --out=FOLDER, as in: pack runs/debug --out=packs/debug")
    source, out = Path(argv[1]), Path(OUT.value)
    if UNPACK.value:
        index = packing.unpack(source, out)
    else:
        index = packing.pack(source, out, SIZE.value * 2**20, CHECKPOINTS.value == "all")
    total = sum(part["bytes"] for part in index["parts"])
    print(f"{index['runs']} runs, {len(index['files'])} files, {len(index['parts'])} parts of {total:,} bytes: {out}")


if __name__ == "__main__":
    cli.run(main)
