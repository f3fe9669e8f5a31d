"""Self-pretraining: a model learns a task's own training inputs before the task (https://arxiv.org/abs/2310.02980).

A switch of benchmark configs that ask for one label a row (lra, seqimage, listops), `start=...`; language models learn
their inputs anyhow, and those of recall, copying and needles are drawn at random. Scores from scratch overstate how far
architectures are apart. Feeds the table `self_pretraining`.

    python -m train --config=configs/lra.py:task=listops,arch=attention,start=pretrain_masked --workdir=runs/first
    python -m train --config=configs/lra.py:task=listops,arch=attention,start=from_masked --workdir=runs/then \\
      --config.init.path=runs/first

`masked` hides tokens, or real numbers, that a bidirectional model names; `causal` asks a causal one for the next token.
Classes are read off the mean of all tokens, as in the paper, and not off a vector that the first run would not have.
A recipe's batch norms are layer norms in causal models. Tasks of pairs (retrieval, links) are only learned from
scratch.
"""

from ml_collections import ConfigDict

from data import TASKS
from model.errors import UserError, choose

STARTS = ("scratch", "pretrain_masked", "pretrain_causal", "from_masked", "from_causal")
VOCABULARY = 264  # of both runs: those of bytes, and a token that masks


def use(config: ConfigDict, start: str, tokens: bool, rate: float) -> None:
    """Makes of a config the run that comes first, or the one behind it; `rate` is the share of a row that is masked."""
    choose("start", start, dict.fromkeys(STARTS))
    if start == "scratch":
        return
    if TASKS[config.data.task].pair:
        raise UserError(
            f"config argument start is {start!r}, and data.task={config.data.task} reads pairs; allowed: start=scratch"
        )
    if start.endswith("causal") and not tokens:
        near = start.replace("causal", "masked")
        raise UserError(
            f"config argument start is {start!r}, and real numbers have no next token; allowed: protocol=lra, whose "
            f"pixels are tokens, or start=scratch, pretrain_masked, from_masked; closest: {near}"
        )
    config.model.pool = "mean"
    if tokens:
        config.model.vocab_size = VOCABULARY
    masked = start.endswith("masked")
    if not masked:
        config.model.causal = True
        if config.model.norm == "batchnorm":  # which would tell of the tokens to come
            config.model.norm = "layernorm"
    if start.startswith("from"):
        config.init.fresh = ("classes/.*",) if tokens else ("classes/.*", "values/.*", "mask")
        return
    config.objective.kind = ("masked" if tokens else "masked_values") if masked else "next_token"
    if masked:
        config.objective[config.objective.kind] = dict(rate=rate)
    config.best, config.test_at = "loss", "last"
