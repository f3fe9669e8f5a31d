"""The training step compiled for a machine that need not be here: does it fit, and how fast could it be?

    python -m train --config=configs/pods.py:arch=mamba2,size=1b3,target=v5e-256 --compile_only --topology=v5e:16x16

Nothing is allocated: the step is traced on shapes, with the shardings it trains with. TPU programs are compiled by the
TPU's compiler where `pip install "jax[tpu]"` has brought it. Where it is not to be had, or finds no room, and for GPUs,
the step is lowered for the chip, which finds what the chip cannot do, and the figures are those of the CPU's compiler,
which partitions the same step over as many devices: its collectives are those of the partitioner that all platforms
share, its memory is an estimate, with plain XLA in the place of kernels.
"""

import contextlib
import dataclasses
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice
from ml_collections import ConfigDict

from data import pipeline
from model.entries import entry
from model.paths import by_path
from train import hlo, kernels, roofline
from train.chips import GIB, Topology
from train.kernels import Call
from train.run import Run, prepare
from train.sharding import standing_for

Row = dict[str, Any]
ROOM = 0.95  # of a chip's memory; the rest is the runtime's and lost between arrays
# Lets the TPU's compiler start on a machine that has none: it asks nobody where it is, and as no chip is taken, several
# processes may have it at once. Which host and chip it is told of does not matter, but it complains if it is not.
WITHOUT_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
NO_ROOM = re.compile(r"Ran out of memory [^\n]*\bHBM\b[^\n]*", re.IGNORECASE)
RESERVED = re.compile(r"Memory Space: default [^\n]*\nTotal bytes: (\d+)")
LOWERED_FOR = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
# How fast a program runs here is of no interest, only what a device does and holds. Barriers, by which layers made anew
# for the backward pass wait for their turn, a CPU's compiler drops before it decides what comes when; here they count.
ESTIMATED = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_enable_concurrency_optimized_scheduler": False,
    "xla_disable_hlo_passes": "cse_barrier_expander",
}
if jax.__version__.startswith("0.10."):  # a third of the time without MLIR's emitters; later versions have no others
    ESTIMATED |= {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step's program for one device, whoever compiled it."""

    compiler: str
    text: str  # after partitioning
    argument_bytes: int
    output_bytes: int  # of those that do not take an argument's place
    temporary_bytes: int
    seconds: float
    kernels: Mapping[Call, float]  # operations of a call of each, where they are known

    @property
    def memory(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temporary_bytes


def measure(config: ConfigDict, *topologies: Topology) -> list[Row]:
    """What is to be said of a step on each topology. All have as many chips; `play_devices` must have been called.

    Those that no compiler of their own is to be had for share a program.
    """
    rows, here = [], None
    for topology in topologies:
        devices, why = devices_of(topology)
        run, compiled, no_room = prepare(config, devices=devices), None, ""
        if devices is not None:
            compiled, no_room = compiled_natively(run)
        row: Row = {"topology": str(topology), "chips": topology.chips, "why": why or no_room}
        if row["why"]:
            row["lowered_for"], row["lower_s"] = lowered_for(config, topology)
        if compiled is None:
            run = run if devices is None else prepare(config)
            compiled = here = here or compiled_here(run)
        row |= figures(run, topology, compiled)
        rows.append(row | {"fits": row["fits"] and not no_room})
    return rows


def play_devices(topology: Topology) -> None:
    """Lets the CPU play as many devices as the topology has; before JAX has looked for any."""
    for name, value in WITHOUT_TPUS.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    jax.config.update("jax_num_cpu_devices", topology.chips)


def devices_of(topology: Topology) -> tuple[Sequence[Any] | None, str]:
    """The topology's devices where their compiler is to be had, else why it is not."""
    if topology.chip.platform == "cpu":
        return None, ""
    if topology.chip.platform == "gpu":
        return None, "a GPU's compiler needs the GPU"
    if importlib.util.find_spec("libtpu") is None:
        return None, 'the TPU compiler is not installed (pip install "jax[tpu]", on x86 Linux)'
    asked: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.each == 1:  # hosts have four otherwise
        asked["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(f"{topology.name}:{topology.shape}", "tpu", **asked)
    except Exception as error:  # of whatever kind: the plugin's own
        return None, f"the TPU compiler does not start ({str(error).splitlines()[0][:120]})"
    return found.devices, ""


def abstract_batch(run: Run) -> dict[str, jax.ShapeDtypeStruct]:
    c = run.config
    example = pipeline.batch_at(run.task, c.data.seed, "train", 1, 0)
    return {
        key: jax.ShapeDtypeStruct(
            (c.batch_size, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype), sharding=run.batch_sharding
        )
        for key, array in example.items()
    }


def lowered_for(config: ConfigDict, topology: Topology) -> tuple[str, float]:
    """Traces the step as the chip's own, on devices that stand for it, and lowers it for its platform."""
    start, chip = time.monotonic(), topology.chip
    device = AbstractDevice(device_kind=chip.kind, num_cores=chip.cores or 1, platform=chip.platform)
    with standing_for(device):
        run = prepare(config)
        traced = run.train_step.trace(run.abstract, abstract_batch(run))
        traced.lower(lowering_platforms=(LOWERED_FOR[chip.platform],))
    return LOWERED_FOR[chip.platform], time.monotonic() - start


def compiled_natively(run: Run) -> tuple[Compiled | None, str]:
    """By the compiler of the run's devices; nothing where that finds no room in their memory, and its word."""
    start = time.monotonic()
    traced = run.train_step.trace(run.abstract, abstract_batch(run))
    try:
        step, dumped = dumping(traced.lower(), {}, "*memory-usage-report.txt")
    except jax.errors.JaxRuntimeError as error:
        if found := NO_ROOM.search(str(error)):
            return None, f"the TPU compiler finds no room ({found[0].rstrip('. ')[:120]})"
        raise
    made = told("the TPU's", step, step.as_text(), time.monotonic() - start)
    if reserved := RESERVED.search(dumped):  # in this memory; its statistics have more as temporary, of others too
        temporary = int(reserved[1]) - made.argument_bytes - made.output_bytes
        made = dataclasses.replace(made, temporary_bytes=max(temporary, 0))
    return dataclasses.replace(made, kernels=kernels.told(traced.jaxpr.jaxpr)), ""


def compiled_here(run: Run) -> Compiled:
    start = time.monotonic()
    step, text = partitioned(run.train_step.lower(run.abstract, abstract_batch(run)))
    return told("the CPU's", step, text, time.monotonic() - start)


def partitioned(lowered: Any) -> tuple[Any, str]:
    """Compiled by the CPU's compiler, and its program for one device before bfloat16 is widened, as a CPU needs it."""
    options = ESTIMATED | {"xla_dump_hlo_pass_re": "spmd-partitioning"}
    step, text = dumping(lowered, options, "*after_spmd-partitioning*.txt")
    return step, text or step.as_text()


def dumping(lowered: Any, options: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """Compiled, and what the compiler has written meanwhile into files of such a name: the last, if there is any."""
    with tempfile.TemporaryDirectory() as folder, anew():
        dumped = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        step = lowered.compile(compiler_options={**options, **dumped})
        found = sorted(Path(folder).glob(name))
        return step, found[-1].read_text() if found else ""


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Without a cache of compiled programs: one that is found there writes nothing on the way."""
    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # it looks at its settings once
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def told(compiler: str, step: Any, text: str, seconds: float) -> Compiled:
    m = step.memory_analysis()
    outputs = m.output_size_in_bytes - m.alias_size_in_bytes
    return Compiled(compiler, text, m.argument_size_in_bytes, outputs, m.temp_size_in_bytes, seconds, {})


def figures(run: Run, topology: Topology, compiled: Compiled) -> Row:
    """All that follows from a program and the chip it is for."""
    c, chip, mesh = run.config, topology.chip, dict(run.mesh.shape)
    work = hlo.work(compiled.text, compiled.kernels)
    tokens = c.batch_size * max(run.objective.lengths)
    row: Row = {
        "mesh": {axis: n for axis, n in mesh.items() if n > 1},
        "params": run.params,
        "active_params": active(run),
        "tokens": tokens,
        "compiler": compiled.compiler,
        "compile_s": compiled.seconds,
        "memory": compiled.memory,
        "state": compiled.argument_bytes,
        "flops": work.flops,
        "useful_flops": useful(run) / topology.chips,
        "kernels": work.kernels,
        "open_loops": work.open_loops,
        "collectives": collectives(work, mesh, topology.slices),
        "fits": True,
    }
    if chip.peak:
        spent = roofline.times(work, compiled.argument_bytes + compiled.output_bytes, chip, mesh, topology.slices)
        row |= {f"{name}_s": value for name, value in dataclasses.asdict(spent).items()}
        row |= {"step_s": spent.apart, "overlapped_s": spent.overlapped, "bound": spent.bound}
        row |= {"hbm": chip.hbm, "fits": compiled.memory <= ROOM * chip.hbm}
        row["share"] = row["useful_flops"] / chip.peak / spent.apart
        row["share_overlapped"] = row["useful_flops"] / chip.peak / spent.overlapped
    return row


def collectives(work: hlo.Work, mesh: dict[str, int], slices: int) -> list[Row]:
    """By kind and mesh axes: how many, and what they bring to a device."""
    found: dict[tuple[str, str], Row] = {}
    for each in work.collectives:
        lie = roofline.axes_between(mesh, slices) if each.slices else roofline.axes_of(each.group, mesh)
        axes = "+".join(lie) or "none"
        row = found.setdefault((each.kind, axes), dict(kind=each.kind, axes=axes, count=0, bytes=0.0, far_bytes=0.0))
        near, far = roofline.received(each, mesh, slices)
        row["count"] += each.count
        row["bytes"] += near + far
        row["far_bytes"] += far
    return sorted(found.values(), key=lambda row: -row["bytes"])


def active(run: Run) -> int:
    """Parameters that a token goes through: of a mixture's experts, those that are chosen."""
    m, total = run.config.model, run.params
    if "experts" not in m:  # as a section only where a layer has them
        return total
    kernels = ("up", "gate", "down")  # of all experts together; a shared one's lie deeper
    of_experts = sum(x.size for path, x in by_path(run.abstract.params).items() if path.rpartition("/")[2] in kernels)
    return total - of_experts + of_experts * m.experts.top_k // m.experts.n_experts


def useful(run: Run) -> float:
    """Operations that a step cannot do without: six a token and parameter, and the scores of attention, fox and mla.

    As PaLM counts them (https://arxiv.org/abs/2204.02311, appendix B), but scores that the mask hides do not count.
    """
    m, length = run.config.model, max(run.objective.lengths)
    scored = 0.0  # channels of keys and of values that a token's queries meet
    for i in range(m.layers if m.mixers else 0):
        name = m.mixers[i % len(m.mixers)]
        kind, section = entry(m, name).mixer, m[name]
        if kind in ("attention", "fox", "mla"):
            window = min(section.get("window", 0) or length, length)
            seen = window if window < length or not m.causal else length / 2
            own = section.head_dim or m.width // section.n_heads
            keys, values = own + section.get("shared_dim", 0), section.get("v_dim", 0) or own
            scored += seen * section.n_heads * (keys + values)
    return run.config.batch_size * length * 6.0 * (active(run) + scored)


def short(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:.3g}"


def lines(row: Row) -> Iterable[str]:
    """The row for reading."""
    mesh = ", ".join(f"{axis}={n}" for axis, n in row["mesh"].items()) or "one device"
    yield f"{row['topology']}: {row['chips']} chips, mesh {mesh}"
    if row["why"]:
        yield (
            f"{row['why']}: lowered for {row['lowered_for']} in {row['lower_s']:.1f} s; the figures below are the CPU "
            "compiler's for as many devices, an estimate"
        )
    yield (
        f"compiled in {row['compile_s']:.1f} s by {row['compiler']} compiler: {row['params']:,} parameters, "
        f"{row['tokens']:,} tokens a step"
    )
    share = f" of {row['hbm'] / GIB:.1f} GiB" if "hbm" in row else ""
    yield f"memory: {short(row['memory'] / GIB)} GiB a chip{share}, {short(row['state'] / GIB)} of it state and batch"
    yield (
        f"products: {row['flops']:.3g} FLOPs a chip, loops gone round; {row['useful_flops']:.3g} by 6 a token and "
        "parameter, and scores"
    )
    if row["kernels"]:
        yield f"  without those of {row['kernels']:,} calls of kernels, which do not say what they do"
    if row["open_loops"]:
        yield f"  {row['open_loops']} loops go round nobody knows how often, and count once"
    for each in row["collectives"]:
        all_bytes, far_bytes = short(each["bytes"] / GIB), short(each["far_bytes"] / GIB)
        far = f", {far_bytes} of them between slices" if each["far_bytes"] else ""
        yield f"  {each['kind']} over {each['axes']}: {each['count']:,} bring {all_bytes} GiB a chip{far}"
    if "step_s" in row:
        yield (
            f"on paper: compute {short(1e3 * row['compute_s'])} ms, memory {short(1e3 * row['hbm_s'])}, network "
            f"{short(1e3 * row['near_s'])}, between slices {short(1e3 * row['far_s'])}; a step takes "
            f"{short(1e3 * row['overlapped_s'])} (all at once) to {short(1e3 * row['step_s'])} ms, "
            f"{row['share_overlapped']:.0%} to {row['share']:.0%} of peak; bound by {row['bound']}"
        )
    verdict = "fits" if row["fits"] else f"does not fit: {ROOM:.0%} of the chip's memory may be used"
    yield verdict if "hbm" in row else "no chip, so nothing to fit"


def main(config: ConfigDict, topology: Topology) -> int:
    (row,) = measure(config, topology)
    for line in lines(row):
        print(line)
    return 0 if row["fits"] else 1
