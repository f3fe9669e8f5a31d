"""What a model is trained for, as a value: `(model, params, batch, rng) -> sums`.

A sum is a pair (sum, count) by the name of its metric. `loss` is minimised, its sum over its count; both are of the
whole batch, so that parts of a batch add up. So are `losses/NAME`, which modules such as a mixture of experts report.
`running`, in training a model that has such, is no sum: a tree of those parameters that this batch has measured anew.
Without `rng` the model is being tested.

Most objectives are a view of the task's batch (other inputs, other targets, other weights) and one cross-entropy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from data import TASKS, Task
from model.asked import ARGUMENTS, Asked
from model.build import Model
from model.errors import UserError
from model.heads import Answers
from model.ops.cross_entropy import Scores, Targets
from model.settings import at_least, below, check_fields
from train import corruption

Batch = Mapping[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]  # metric -> (sum, count)
Smoothing = Annotated[float, at_least(0), below(1)]


@dataclass(frozen=True)
class Objective:
    """Fields of a subclass are its section `objective.<name>` in the config, and their types say what they may be."""

    task: Any  # the Task that it is made of
    # Of a target's probability, the share spread over all answers (https://arxiv.org/abs/1512.00567) in training.
    label_smoothing: Smoothing = 0.0

    name: ClassVar[str]
    # Whether it makes its own targets from running text; and whether from tokens too that are there to be classified.
    needs_text: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False
    # The values of `model.kind` that can serve it; (): any.
    model_kinds: ClassVar[tuple[str, ...]] = ()
    # Whether its loss is the mean of -log p of what the task asks for, of which the exponential is a perplexity.
    likelihood: ClassVar[bool] = False
    # Whether the rows of a batch are compared with each other, so that what is asked depends on how many there are.
    compares_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self, f"objective.{self.name}")
        if self.needs_text and not self.task.running_text and not (self.takes_rows and classified_tokens(self.task)):
            able = ", ".join(name for name, task in TASKS.items() if task.running_text)
            rows = ", or a class for rows of tokens" if self.takes_rows else ""
            raise UserError(
                f"objective {self.name!r} needs running text, and task {self.task.name!r} has none; allowed: "
                f"data.task={able}{rows}; closest: objective.kind=task"
            )
        self.check_task(self.task)

    def check_task(self, task: Task) -> None:
        """Raises UserError if the settings do not go with the task."""

    def check_kind(self, kind: str) -> None:
        """Raises UserError if models of a kind cannot serve it."""
        if self.model_kinds and kind not in self.model_kinds:
            raise UserError(
                f"objective {self.name!r} cannot be served by model.kind {kind!r}; allowed: "
                f"{', '.join(self.model_kinds)}; closest: model.kind={self.model_kinds[0]}"
            )

    def check_model(self, model: Model, section: Mapping[str, Any]) -> None:
        """Raises UserError if a model, that of a config's section, sees its answers or not what they follow from."""

    @property
    def extra_tokens(self) -> int:
        """Token ids that it adds after the task's own."""
        return 0

    @property
    def asked(self) -> Asked:
        """What a model must know to be built for it."""
        asked = self.task.asked
        return replace(asked, vocab_size=asked.vocab_size + self.extra_tokens)

    def view(self, batch: Batch, rng: jax.Array | None) -> Batch:
        """The batch that the model is given, of the one that the task made."""
        return batch

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences that a model is given."""
        return self.task.length, self.task.target_length

    @property
    def attributes(self) -> dict[str, tuple[str, ...]]:
        """Names of the attributes accuracy is sliced by -> labels of their bins."""
        return self.task.attributes

    def baselines(self) -> dict[str, float]:
        """Accuracies of trivial predictors, printed beside results."""
        return self.task.baselines()

    def __call__(self, model: Model, params: Any, batch: Batch, rng: jax.Array | None) -> Sums:
        """Loss and accuracy; a test slices the accuracy by every bin of every attribute, of text the loss too."""
        batch = self.view(batch, rng)
        targets = self.targets(batch, self.label_smoothing if rng is not None else 0.0)
        found, reports, running = answers(model, params, batch, rng, targets)
        loss, hits, weights = self.judge(found, batch)
        loss, hits, count = loss * weights, hits * weights, weights.sum()
        total = found.total if isinstance(found, Scores) else loss.sum()
        sums = {"loss": (total, count), "accuracy": (hits.sum(), count)}
        sums |= {name: (value * count, count) for name, value in reports.items()}
        sums |= {"running": running} if running else {}
        if rng is None:
            sums |= sliced("accuracy", self.attributes, batch, hits, weights)
            if self.task.next_token and self.likelihood:
                sums |= sliced("loss", self.attributes, batch, loss, weights)
        if self.task.whole_answers:
            sums |= exact(self.attributes if rng is None else {}, batch, hits)
        return sums

    def targets(self, batch: Batch, smoothing: float) -> Targets | None:
        """The right answers, of which the model tells the scores; None: it is asked for its answers themselves."""
        return Targets(batch["targets"], smoothing, batch["weights"])

    def judge(self, found: Answers, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of each target the loss, whether the model's answer hits it, and how much it counts."""
        weights = batch["weights"]
        return jnp.where(weights > 0, found.loss, 0), found.hits, weights  # what is not asked may be answered by NaN


def answers(
    model: Model, params: Any, batch: Batch, rng: jax.Array | None, targets: Targets | None
) -> tuple[Answers, dict[str, jax.Array], Mapping[str, Any]]:
    """The model's answers to a batch, or, where targets are given, their scores.

    And in training what its modules report, by name, and its new running statistics.
    `losses/NAME` is the sum over layers, for the step to add to the objective's loss; `reports/NAME` is the mean.
    """
    (answered, _), sown = model.apply(
        {"params": params},
        batch["inputs"],
        **arguments(batch),
        targets=targets,
        train=rng is not None,
        rngs=None if rng is None else {"dropout": rng},
        mutable=["losses", "reports", "running"],
    )
    reports = {}
    for kind, over_layers in (("losses", jnp.sum), ("reports", jnp.mean)):
        found: dict[str, list[jax.Array]] = {}
        for path, value in jax.tree_util.tree_leaves_with_path(sown.get(kind, {})):
            found.setdefault(path[-2].key, []).append(value.reshape(-1))
        reports |= {f"{kind}/{name}": over_layers(jnp.concatenate(values)) for name, values in found.items()}
    return answered, reports, sown.get("running", {})


def row_keys(rng: jax.Array | None, tokens: jax.Array) -> jax.Array:
    """A key for each row `[B]` of tokens to be corrupted by; a test asks the same each time."""
    return corruption.row_keys(jax.random.key(0) if rng is None else rng, tokens)


def row_weights(batch: Batch) -> jax.Array:
    """The weight `[B]` of each row: 0 where it is past the end of its split."""
    weights = batch["weights"]
    return (weights.reshape(len(weights), -1) > 0).any(axis=1).astype(weights.dtype)


def classified_tokens(task: Task) -> bool:
    """Whether a task asks for the class of a row of tokens."""
    return task.kind == "classify" and task.inputs is None and task.image is None and not task.pair


def arguments(batch: Batch) -> Batch:
    """What of a batch a model is called with, besides its inputs. All of a task's padding is behind its rows."""
    return {name: batch[name] for name in ARGUMENTS if name in batch} | dict(right_padded=True)


def sliced(
    metric: str, attributes: Mapping[str, tuple[str, ...]], batch: Batch, scores: jax.Array, weights: jax.Array
) -> Sums:
    """A metric within every bin of every attribute; `scores` are weighted already."""
    sums = {}
    for name, labels in attributes.items():
        bins = batch[f"attr_{name}"].reshape(-1)
        sums[f"{metric}/{name}"] = tuple(
            jax.ops.segment_sum(values.reshape(-1), bins, len(labels)) for values in (scores, weights)
        )
    return sums


def exact(attributes: Mapping[str, tuple[str, ...]], batch: Batch, hits: jax.Array) -> Sums:
    """Rows whose every target is hit, also within the bins of attributes, which are the same all along a row.

    All of an answer is then what the model would write by itself, taking the likeliest token each time.
    """
    weights = batch["weights"]
    rows = (weights > 0).any(-1).astype(jnp.float32)
    right = (hits >= weights).all(-1) * rows
    sums = {"exact": (right.sum(), rows.sum())}
    for name, labels in attributes.items():
        bins = batch[f"attr_{name}"].max(-1)  # padding has 0
        sums[f"exact/{name}"] = tuple(jax.ops.segment_sum(values, bins, len(labels)) for values in (right, rows))
    return sums
