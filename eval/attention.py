"""Looking inside: attention maps and what they say, for the first examples of a split or for a prompt."""

import hashlib
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from data import Task, pipeline
from data.text import Text
from eval.accuracy import show
from eval.continuation import check_tokens, encode
from eval.maps import SCORES, effective_rank, equal_weights, scores, seen
from eval.report import PROMPT, changed, columns, provenance, write
from eval.restore import Restored
from model.build import Model
from model.errors import UserError
from model.mixers import MIXERS

LIMIT = 2048  # tokens: a layer's maps hold heads x tokens x tokens numbers
CLS = -1  # stands for the vector that a classifier may put before its tokens


class Document(NamedTuple):
    """One document of a row, its padding left out, and what the layers made of it."""

    tokens: np.ndarray  # [L]
    layers: list[dict[str, np.ndarray]]  # output [L, D], and of softmax attention weights [H, L, L]


def attention(restored: Restored, *, split: str, examples: int, prompt: str) -> None:
    """The suite: writes numbers and two pictures into the run's folder, prints the numbers."""
    from eval.pictures import draw_maps, draw_summary  # matplotlib takes half a second that other suites do not need

    run = restored.run
    check_tokens(run.task)
    rows = prompted(run.task, prompt, examples) if prompt else first_examples(restored, split, examples)
    check(restored, *rows)
    documents = documents_of(restored, *rows)
    first = next(documents)
    numbers = together([measure(first), *map(measure, documents)])  # one by one, for the room that maps take
    mixers = run.config.model.mixers
    report = provenance(restored, PROMPT if prompt else split)
    report |= {"prompt": prompt} if prompt else {"examples": examples}
    report["layers"] = [{"layer": i, "mixer": mixers[i % len(mixers)], **layer} for i, layer in enumerate(numbers)]
    name = f"prompt-{hashlib.sha256(repr(prompt).encode()).hexdigest()[:8]}" if prompt else f"{split}-{examples}"
    path = write(restored, "attention", name, report)
    pictures = [path.with_name(f"{path.stem}-{kind}.png") for kind in ("maps", "summary")]
    title = headline(report)
    maps = [(i, layer["weights"]) for i, layer in enumerate(first.layers) if "weights" in layer]
    draw_maps(pictures[0], title + missing(report), maps, labels(run.task, first.tokens))
    draw_summary(pictures[1], title, report["layers"])
    print(title)
    Console(highlight=False).print(table(report))
    print(*pictures, path, sep="\n")


def first_examples(restored: Restored, split: str, examples: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens and segments, `[B, L]`, of the first rows of a split."""
    task, there = restored.run.task, restored.run.task.size(split)
    if examples < 1 or (there is not None and examples > there):
        allowed = "at least 1" if there is None else f"1 to {there:,}, all of split {split}"
        raise UserError(f"examples is {examples}; allowed: {allowed}; closest: {1 if examples < 1 else there}")
    if task.length > LIMIT:
        raise UserError(
            f"a row of {task.name} has {task.length:,} tokens; allowed: up to {LIMIT:,}, as maps grow with the square; "
            f"shorten it by --config.data.{task.name}.length={LIMIT} or give a --prompt"
        )
    batch = pipeline.batch_at(task, restored.run.config.data.seed, split, examples, 0, order=None)
    return batch["inputs"], batch.get("segments")


def prompted(task: Task, prompt: str, examples: int) -> tuple[np.ndarray, None]:
    """One row: the prompt, read as for the generate suite."""
    if examples != 1:
        raise UserError(f"examples is {examples}, but a prompt is one; allowed: --examples or --prompt; closest: 1")
    tokens = encode(task, prompt)
    near = min(max(len(tokens), 2), LIMIT)
    if len(tokens) != near:
        raise UserError(f"the prompt has {len(tokens):,} tokens; allowed: 2 to {LIMIT:,}; closest: {near:,}")
    return np.array([tokens], np.int32), None


def check(restored: Restored, tokens: np.ndarray, segments: np.ndarray | None) -> None:
    """Refuses, before anything is compiled, a model without attention, or of more than one stack."""
    kind = restored.run.config.model.kind
    if kind == "encoder_decoder" or restored.run.task.asked.source:
        raise UserError(f"suite attention looks into one stack of one sequence; allowed: model.kind=stack, not {kind}")
    shapes = jax.eval_shape(partial(inside, restored.run.model), restored.params, tokens, segments)
    if not any("weights" in layer for layer in shapes):
        c = restored.run.config.model
        has = ", ".join(dict.fromkeys(c.mixers)) or f"none in a {c.kind}"
        allowed = ", ".join(name for name, mixer in MIXERS.items() if mixer.softmax)
        raise UserError(f"this model's mixers, {has}, have no attention maps; allowed: a run with {allowed} in a layer")


@partial(jax.jit, static_argnames="model")
def inside(model: Model, params: Any, tokens: jax.Array, segments: jax.Array | None) -> list[dict[str, jax.Array]]:
    """The output `[B, L, D]` of each layer, and of softmax attention the weights `[B, H, L, L]`, from layer 0 on."""
    _, kept = model.apply({"params": params}, tokens, segments=segments, mutable=["maps"])
    return [
        {"output": block["output"][0].astype(jnp.float32)}
        | {name: sown[0] for name, sown in block.get("mixer", {}).items() if name == "weights"}
        for block in in_order(kept["maps"].get("stack", {}))
    ]


def in_order(stack: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The layers' collections from 0 on: every turn of the loop through its cycle of blocks, then the rest."""
    looped, rest = (layers_of_cycle(stack.get(name, {})) for name in ("layers", "rest"))
    for turn in range(len(looped[0]["output"][0]) if looped else 0):
        yield from jax.tree.map(operator.itemgetter(turn), looped)
    yield from rest


def layers_of_cycle(cycle: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [cycle[f"block_{i}"] for i in range(len(cycle))]


def documents_of(restored: Restored, tokens: np.ndarray, segments: np.ndarray | None) -> Iterator[Document]:
    """The documents of the rows `[B, L]`, looked into one row at a time."""
    model = restored.run.model
    for i, row in enumerate(tokens):
        whose = np.ones_like(row) if segments is None else segments[i]
        held = inside(model, restored.params, row[None], None if segments is None else whose[None])
        held = [{name: np.asarray(array)[0] for name, array in layer.items()} for layer in held]
        if model.cls:
            row, whose = np.concatenate([[CLS], row]), np.concatenate([whose[:1], whose])
        for segment in np.unique(whose[whose > 0]):
            at = np.flatnonzero(whose == segment)
            yield Document(row[at], [of_document(layer, at) for layer in held])


def of_document(layer: Mapping[str, np.ndarray], at: np.ndarray) -> dict[str, np.ndarray]:
    """A layer's arrays at some positions."""
    out = {"output": layer["output"][at]}
    if "weights" in layer:
        out["weights"] = layer["weights"][:, at[:, None], at]
    return out


def measure(document: Document) -> list[dict[str, Any]]:
    """Every layer's numbers for one document: its rank, its heads', and those of equal weights on all that it sees."""
    out = []
    for layer in document.layers:
        numbers = {"rank": effective_rank(layer["output"]), "rank_limit": min(layer["output"].shape), "heads": []}
        if "weights" in layer:
            mask = seen(layer["weights"])
            numbers["heads"] = [scores(weights, mask, document.tokens) for weights in layer["weights"]]
            numbers["equal_weights"] = scores(equal_weights(mask), mask, document.tokens)
        out.append(numbers)
    return out


def together(numbers: Sequence[Any]) -> Any:
    """Like numbers of several documents in one: the least `min`, the greatest `max`, of others the mean."""

    def combined(path, *values):
        values = np.array(values, np.float64)
        known = values[~np.isnan(values)]
        reduce = {"min": np.min, "max": np.max}.get(path[-1].key, np.mean)
        return float(reduce(known)) if known.size else math.nan

    return jax.tree_util.tree_map_with_path(combined, *numbers)


def headline(report: dict[str, Any]) -> str:
    task, at, end = report["task"], f"at step {report['step']}", changed(report)
    if "prompt" in report:
        return f"{task} prompt {at}{end}"
    n = report["examples"]
    return f"{task} {report['split']} split {at}: {n:,} example{'s'[: n > 1]}{end}"


def missing(report: dict[str, Any]) -> str:
    """What the grid of maps does not show of the report."""
    without = ", ".join(f"{layer['layer']} {layer['mixer']}" for layer in report["layers"] if not layer["heads"])
    first = ", the first of them shown" if report.get("examples", 1) > 1 else ""
    return first + (f"\nlayers without a map: {without}" if without else "")


def labels(task: Task, tokens: np.ndarray) -> list[str]:
    """What to write at the axes for each token: a text's character, or the id."""

    def label(token: int) -> str:
        if token == CLS:
            return "cls"
        if not isinstance(task, Text):
            return str(token)
        return chr(token) if 32 < token < 127 else {9: "⇥", 10: "↵", 32: "␣"}.get(token, f"{token:02x}")

    return [label(int(token)) for token in tokens]


def table(report: dict[str, Any]) -> Table:
    """A line for each head, and one below a layer's heads for equal weights on all that they see."""
    names = ("rank", "head", "entropy", "first", "previous", "induction")
    out = columns(Column("layer", no_wrap=True), *names)
    for layer in report["layers"]:
        lines = [*enumerate(layer["heads"]), ("equal", layer["equal_weights"])] if layer["heads"] else []
        for i, (head, of) in enumerate(lines):
            place = (f"{layer['layer']} {layer['mixer']}", f"{layer['rank']:.1f}") if i == 0 else ("", "")
            values = (of["entropy"]["mean"], *(of[score] for score in SCORES))
            out.add_row(*place, str(head), *map(show, values))
        if not lines:
            out.add_row(f"{layer['layer']} {layer['mixer']}", f"{layer['rank']:.1f}", "no map", *"----")
        out.add_section()
    return out
