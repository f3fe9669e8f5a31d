"""Names everything there is to choose from, one line each; of what is named, every setting; of tables, every scale.

python -m experiments.list
python -m experiments.list mamba rope lra
"""

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import data
from configs.archs import ARCHS
from data.sets import SETS
from experiments.running.runs import RunSpec, texts
from experiments.tables.definitions import TABLES
from experiments.tables.layout import plain
from experiments.tables.table import Table
from model import settings
from model.build import KINDS
from model.contract import Mixer
from model.entries import BROUGHT
from model.errors import choose
from model.mixers import MIXERS
from model.mlps.experts import Experts
from model.mlps.mlp import MLP
from model.ops.attention import IMPLEMENTATIONS, support_matrix
from model.positions import POSITIONS, Position
from model.weights import FAMILIES
from train import cli
from train import config as configs
from train.objective import Objective
from train.objectives import OBJECTIVES

WITHOUT_SETTINGS = ("models", "attention", "sets", "weights", "configs")  # what is named there has its line alone


def catalogue() -> dict[str, dict[str, str]]:
    """Section -> name -> what it is."""
    return {
        "models (model.kind)": {name: first_line(kind) for name, kind in KINDS.items()},
        "mixers (model.mixers)": {name: first_line(mixer) for name, mixer in sorted(MIXERS.items())},
        "positions (model.position)": {name: first_line(position) for name, position in sorted(POSITIONS.items())},
        "attention (model.attention.implementation)": {n: can.summary for n, can in IMPLEMENTATIONS.items()},
        "what each attention implementation serves": served(),
        "tasks (data.task)": {name: first_line(task) for name, task in sorted(data.TASKS.items())},
        "sets (data.prepare)": {name: release.summary for name, release in sorted(SETS.items())},
        "objectives (objective.kind)": {name: first_line(one) for name, one in sorted(OBJECTIVES.items())},
        "architectures (arch=...)": {name: changed(arch) for name, arch in ARCHS.items()},
        "weights (eval --weights=DIR, --config.init.path=DIR)": {
            name: first_line(sys.modules[family.rows.__module__]) for name, family in FAMILIES.items()
        },
        "configs (--config=...)": config_files(Path("configs")),
        "tables (experiments.reproduce)": {name: table.description for name, table in TABLES.items()},
    }


def described(name: str) -> dict[str, dict[str, str]]:
    """Of everything with this name: heading -> setting -> its default and what it may be, or the line it has."""
    declared = {
        "mixer": {mixer: settings.section(cls, without=Mixer) for mixer, cls in MIXERS.items()},
        "position": {position: settings.section(cls, without=Position) for position, cls in POSITIONS.items()},
        **{key: {name: settings.section(cls) for name, cls in choices.items()} for key, choices in BROUGHT.items()},
        "MLP": {"experts": settings.section(Experts, without=MLP)},
        "task": {task: settings.section(cls) for task, cls in data.TASKS.items()},
        "objective": {kind: settings.section(cls, without=Objective) for kind, cls in OBJECTIVES.items()},
    }
    room = {
        "mixer": "model",
        "position": "model",
        "kind": "model",
        "norm": "model",
        "MLP": "model",
        "task": "data",
        "objective": "objective",
    }
    found = {}
    for kind, table in declared.items():
        if name in table:
            lines = {key: f"{field.default!r}; {settings.says(field.type)}" for key, field in table[name].items()}
            found[f"{kind} {name} ({room[kind]}.{name})"] = lines
    if name in ARCHS:
        found[f"architecture {name} (arch={name})"] = {
            f"model.{k}": repr(v) for k, v in configs.flatten(ARCHS[name]).items()
        }
    if name in TABLES:
        found[f"table {name} (experiments.reproduce {name})"] = compared(TABLES[name])
    lines = {section: names for section, names in catalogue().items() if section.partition(" ")[0] in WITHOUT_SETTINGS}
    found |= {section: {name: names[name]} for section, names in lines.items() if name in names}
    if not found:
        choose("name", name, {*itertools.chain(*declared.values(), *lines.values()), *ARCHS, *TABLES})
    return found


def compared(table: Table) -> dict[str, str]:
    """What a table sets beside each other, and the runs of each scale."""
    told = {"asks": table.description, "lines": " and ".join(table.by), "columns": table.across or "one"}
    told["numbers"] = ", ".join([table.metric, *table.also])
    if taken := [name for name, other in TABLES.items() if other.part_of == table.name]:
        told["takes along"] = ", ".join(taken)
    for scale in table.scales:
        told[f"scale {scale}"] = of_scale(table.runs(scale))
    if table.unpublished:
        told["scale paper"] = f"none: {table.unpublished}"
    return told


def of_scale(runs: Sequence[RunSpec]) -> str:
    """How many runs there are, the values of each label, and the steps of all."""
    labels = dict.fromkeys(key for run in runs for key in run.coordinates)
    values = {key: dict.fromkeys(run.coordinates[key] for run in runs if key in run.coordinates) for key in labels}
    parts = [f"{key} {', '.join(map(plain, found))}" for key, found in values.items()]
    return "; ".join([f"{len(runs):,} runs of {sum(map(steps, runs)):,} steps together", *parts])


def steps(run: RunSpec) -> int:
    return _steps(run.config, tuple((key, value) for key, value in texts(run) if key != "seed"))


@functools.cache
def _steps(config: str, overrides: tuple[tuple[str, str], ...]) -> int:
    return configs.load(config, overrides).steps


def served() -> dict[str, str]:
    """Feature or requirement -> one column per implementation, under a line of their names."""
    table = {"": {name: name for name in IMPLEMENTATIONS}} | support_matrix()
    widths = [max(len(line[name]) for line in table.values()) for name in IMPLEMENTATIONS]
    return {
        what: "  ".join(f"{cell:{width}}" for cell, width in zip(line.values(), widths, strict=True)).rstrip()
        for what, line in table.items()
    }


def first_line(thing: object) -> str:
    """The first line of a docstring; a class without one says what its parent says."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def changed(arch: dict) -> str:
    """What a named architecture changes in the model section."""
    flat = configs.flatten(arch)
    shown = {key: "+".join(value) if isinstance(value, tuple) else value for key, value in flat.items()}
    return ", ".join(f"{key}={value}" for key, value in shown.items() if value != "")


def config_files(folder: Path) -> dict[str, str]:
    """Files that define get_config, read without running them; the base is not a run."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        defines = any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body)
        if defines and path.name != "base.py":
            found[str(path)] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def main(argv: list[str]) -> None:
    cli.refuse_arguments(argv[:1], "list", "names of what it shows, such as mixers, tasks and tables")
    console = Console(highlight=False, soft_wrap=True)
    shown = catalogue() if len(argv) == 1 else dict(itertools.chain(*(described(name).items() for name in argv[1:])))
    for section, names in shown.items():
        console.print(Text(section, style="bold"))
        width = max(map(len, names), default=0)
        for name, line in names.items():
            console.print(Text(f"  {name:{width}}  {line}".rstrip()))


if __name__ == "__main__":
    cli.run(main)
