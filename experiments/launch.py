"""Writes the file that starts one training command on a pod, for an engine that you have.

    python -m experiments.launch gcloud --config=configs/debug.py --workdir=/runs/a --topology=v5e:4x4 \\
      --image=REGISTRY/longview --zone=us-west4-a --storage=10.0.0.2:/runs > train.sh
    python -m experiments.launch gke ... --storage=CLAIM | kubectl apply -f -
    python -m experiments.launch skypilot ... --storage=gs://BUCKET > train.yaml

The image is what the Containerfile builds, with this code in it. All hosts must see the workdir's parent: --storage is
mounted there, an NFS export for gcloud, a persistent volume claim for GKE, a bucket for SkyPilot. `--config.KEY=VALUE`
as in training. Nothing is started, and nothing is written but to standard output.
"""

import math
import re
from pathlib import PurePosixPath

from absl import flags
from ml_collections import ConfigDict

from experiments.running.engines import ENGINES, STORED, Pod, hosts
from model.errors import UserError, choose
from model.settings import Name, shown
from train import chips, cli, sharding
from train import config as configs

CONFIG = cli.flag("config", Name, None, "Config file, FILE.py[:key=value,...], of this repository.")
WORKDIR = cli.flag("workdir", Name, None, "The run's folder, as the hosts see it: an absolute path.")
TOPOLOGY = cli.flag("topology", Name, None, "What it runs on, such as v5e:16x16, 2xv5e:16x16 or h100:64.")
IMAGE = cli.flag("image", Name, None, "The image to run, as a registry has it.")
NAME = cli.flag("name", Name, None, "What the job is called; default after the workdir.")
STORAGE = cli.flag("storage", str, "", "What is mounted at the workdir's parent on every host.")
ZONE = cli.flag("zone", str, "", "Google's zone, for gcloud and for TPUs of SkyPilot.")
SPOT = flags.DEFINE_bool("spot", False, "Take machines that may be taken back.")
flags.declare_key_flag("override")


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        raise UserError(f"launch takes one engine; choose from {', '.join(ENGINES)}")
    engine = choose("engine", argv[1], ENGINES)
    for flag in (CONFIG, WORKDIR, TOPOLOGY, IMAGE):
        if not flag.value:
            raise UserError(f"--{flag.name} is missing; `python -m experiments.launch --help` has an example")
    config = configs.load(CONFIG.value, cli.overrides())
    configs.check(config)
    if CONFIG.value.startswith(("/", "..")):
        raise UserError(f"--config is {CONFIG.value}; the image holds this repository, so give a path in it")
    workdir, topology = check_workdir(WORKDIR.value), chips.parse(TOPOLOGY.value)
    check_mesh(config, topology)
    made = Pod(
        name=job_name(NAME.value or PurePosixPath(WORKDIR.value).name, asked=NAME.value is not None),
        command=command(CONFIG.value, workdir, cli.overrides(), hosts(topology) > 1),
        workdir=workdir,
        topology=topology,
        image=check_word("image", IMAGE.value, r"[\w./:@-]+", "the name of an image, as REGISTRY/longview:TAG"),
        storage=STORAGE.value and check_word("storage", STORAGE.value, *STORED[argv[1]]),
        zone=ZONE.value and check_word("zone", ZONE.value, "[a-z0-9-]+", "the name of a zone, as us-west4-a"),
        spot=SPOT.value,
    )
    print(engine(made), end="")
    return 0


def check_mesh(config: ConfigDict, topology: chips.Topology) -> None:
    """Refuses what every host would, once it has its machine: a mesh of other chips, or a batch it cannot share out."""
    sizes = dict(zip(sharding.AXES, sharding.mesh_shape(config.mesh, topology.chips), strict=True))
    rules = sharding.rules_of(config.mesh)
    shares = math.prod(sizes[axis] for axis in dict(rules).get("batch", ()))
    sharding.check_rows(rules, config.batch_size, shares, config.optim.accumulate)


def command(config: str, workdir: str, overrides: list[tuple[str, str]], several: bool) -> tuple[str, ...]:
    words = ["python", "-m", "train", f"--config={config}", f"--workdir={workdir}"]
    return (*words, *(["--distributed"] if several else []), *(f"--config.{key}={value}" for key, value in overrides))


def check_workdir(text: str) -> str:
    if not re.fullmatch(r"(/+[\w.,=+-]+){2,}/*", text, re.ASCII) or ".." in text:  # no blanks, and no addresses
        raise UserError(
            f"--workdir is {shown(text)}; it takes the path of a folder in one that all hosts mount, as /runs/a"
        )
    return str(PurePosixPath(text))


def check_word(flag: str, text: str, form: str, says: str) -> str:
    if not re.fullmatch(form, text, re.ASCII):
        raise UserError(f"--{flag} is {shown(text)}; it takes {says}")
    return text


def job_name(text: str, asked: bool) -> str:
    """What every engine takes for a name: small letters, digits and dashes; made so where nobody asked for it."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")
    if asked and plain != text:
        raise UserError(
            f"--name is {shown(text)}; it takes up to 40 small letters, digits and dashes; closest: {plain}"
        )
    return plain


if __name__ == "__main__":
    cli.run(main)
