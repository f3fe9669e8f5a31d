"""Where the time of a training step goes, by module and pass: what the profiler of its device tells of each operation.

Operations that were fused count where the result of the fusion belongs. Times of operations are added up: on a CPU some
run beside each other, and then they are more than the step.
"""

import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from experiments.measurements.overhead import first_batch, repeated
from experiments.measurements.sheet import Sheet
from model.errors import UserError
from train import config as configs
from train import hlo
from train.run import prepare
from train.sharding import put_batch

STEPS = 5  # that are traced
ALL, NONE = "all", "none"  # in the place of a module
MOST = 5  # kernels that a row names
OF_OPS = re.compile(r"\w+\[\w+\]")  # an op and its implementation, as `model.ops.named` writes them
AROUND = ("while", "conditional", "call")  # their time is that of what is in them, where that is traced too
CALLED = ("calls", "to_apply", "body", "branch_computations", "true_computation", "false_computation")
UNNAMED_LAUNCHES = "--xla_gpu_enable_command_buffer="  # or kernels are launched by the graph, and have no name
SHEET = Sheet(
    {"config": "config", "module": "module", "pass": "pass"},
    {
        "ms": ("ms a step", ".3f"),
        "share": ("of all", ".1%"),
        "launches": ("launches", ",.0f"),
        "longest": ("the longest", ""),
        "step_ms": ("ms with what lies between", ".2f"),
    },
)

Row = dict[str, Any]
Modules = Mapping[str, set[str]]  # by name, which others call modules of that name; "": the model


class Place(NamedTuple):
    """Where an operation belongs."""

    module: str
    phase: str  # forward, backward, recomputed for that, update, by the compiler alone


class Spent(NamedTuple):
    """What was traced of one operation."""

    op: str  # its name in the compiled program
    kernel: str  # what ran
    ns: float


def name_launches() -> None:
    """Has kernels launched one by one; before JAX looks for devices."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNNAMED_LAUNCHES}".strip()


def measure(spec: str, overrides: Sequence[tuple[str, str]]) -> list[Row]:
    """A row for the whole step, then one per module and pass, the longest first."""
    run = prepare(configs.load(spec, overrides))
    batch = put_batch(first_batch(run), run.batch_sharding)
    with watched() as modules:
        lowered = run.train_step.lower(run.abstract, batch)
    step = lowered.compile()
    turns = repeated(run.init(), lambda state: step(state, batch), STEPS)
    next(turns)  # warm
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = next(turns)
        (file,) = Path(folder).rglob("*.xplane.pb")
        traced = spent(jax.profiler.ProfileData.from_file(str(file)))
    found = rows(traced, places(step.as_text(), modules, {each.op for each in traced}))
    if not found:
        raise UserError(
            f"the profiler names no operation on {jax.default_backend()}; allowed: cpu, gpu; "
            "closest: a trace by python -m train --profile=100:5"
        )
    found[0]["step_ms"] = 1e3 * seconds
    return found


def spent(profile: jax.profiler.ProfileData) -> list[Spent]:
    """The operations of the first device; on a GPU by its streams, as other lines tell of the same kernels again."""
    for plane in sorted(profile.planes, key=lambda plane: not plane.name.startswith("/device:")):
        lines = list(plane.lines)
        streams = [line for line in lines if line.name.startswith("Stream")]
        events = [(event, dict(event.stats)) for line in streams or lines for event in line.events]
        found = [
            Spent(told["hlo_op"], event.name, event.duration_ns)
            for event, told in events
            if "hlo_op" in told and told.get("device_ordinal", 0) == 0
        ]
        if found:
            return found
    return []


@contextmanager
def watched() -> Iterator[Modules]:
    """The modules that are called while a model is traced."""
    found: Modules = defaultdict(set)
    around = [""]

    def calls(method: Callable, args: Any, kwargs: Any, context: Any) -> Any:
        name = context.module.name or around[-1]
        if name != around[-1]:
            found[name].add(around[-1])
        around.append(name)
        try:
            return method(*args, **kwargs)
        finally:
            around.pop()

    with nn.intercept_methods(calls):
        yield found


def places(text: str, modules: Modules, traced: Collection[str]) -> dict[str, Place]:
    """Where each operation of a program belongs, but for those around others that are traced."""
    computations, _ = hlo.parse(text)
    found = {}
    for computation in computations.values():
        for each in computation.instructions.values():
            inside = [computations[name] for key in CALLED for name in hlo.called(each, key)]
            if each.opcode not in AROUND or not any(inner.instructions.keys() & traced for inner in inside):
                told = [each, *(inner.root for inner in inside)]
                told += [one for inner in inside for one in inner.instructions.values()]
                found[each.name] = place(next(filter(None, map(hlo.op_name, told)), ""), modules)
    return found


def place(name: str, modules: Modules) -> Place:
    """By what JAX calls an operation: the functions and modules that it is in, from the outermost in.

    Of one that was moved out of a loop it does not tell the outermost.
    """
    path: list[str] = []
    for part in re.split(r"[/;]", name):
        if part in path:  # transposing and recomputing tell of the same modules again
            del path[path.index(part) :]
        if part in modules or OF_OPS.fullmatch(part):
            path.append(part)
    while path and len(outer := modules.get(path[0], ())) == 1 and "" not in outer:
        path = [*outer, *path]
    if not name:
        phase = "by the compiler"
    elif "transpose(" in name:
        phase = "recomputed" if "rematted_computation" in name else "backward"
    else:
        phase = "forward" if path or "jvp(" in name else "update"
    return Place("/".join(path) or NONE, phase)


def rows(traced: Sequence[Spent], places: Mapping[str, Place]) -> list[Row]:
    times: dict[Place, Counter] = defaultdict(Counter)  # of each kernel
    launches: Counter = Counter()
    for each in traced:
        if each.op in places:
            times[places[each.op]][each.kernel] += each.ns
            launches[places[each.op]] += 1
    total = sum(kernels.total() for kernels in times.values())

    def row(place: Place, ns: float, n: int, **more: Any) -> Row:
        return {
            "module": place.module,
            "pass": place.phase,
            "ms": ns / STEPS / 1e6,
            "share": ns / total,
            "launches": n / STEPS,
        } | more

    found = []
    for place, kernels in sorted(times.items(), key=lambda item: -item[1].total()):
        longest = {kernel: ns / STEPS / 1e6 for kernel, ns in kernels.most_common(MOST)}
        found.append(row(place, kernels.total(), launches[place], longest=next(iter(longest)), kernels_ms=longest))
    return [row(Place(ALL, ALL), total, launches.total()), *found] if found else []
