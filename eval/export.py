"""A checkpoint written for others: safetensors and the config.json that transformers reads."""

from pathlib import Path
from typing import Any

from eval.restore import Restored
from model.errors import UserError
from model.paths import by_path
from model.weights import FAMILIES
from model.weights.family import Family, differences, spelled_out
from model.weights.names import export, links
from model.weights.safetensors import write_folder
from train import config as configs


def exported(restored: Restored, *, out: str, family: str) -> None:
    """The suite: writes a new folder, and prints how transformers reads it."""
    if not out:
        raise UserError("--out is missing: the folder to write, e.g. --out=exported")
    run = restored.run
    c, vocab_size = run.config.model.to_dict(), run.model.vocab_size
    if c["kind"] != "stack" or run.model.n_classes:
        what = f"a classifier of {run.model.n_classes} classes" if c["kind"] == "stack" else f"a {c['kind']}"
        raise UserError(f"this model is {what}; allowed: language models, as the families are: {', '.join(FAMILIES)}")
    chosen = FAMILIES[family] if family else find(c, vocab_size)
    config = expressed(chosen, c, vocab_size)
    table = links(chosen.rows(chosen.settings(config)), c["layers"], len(c["mixers"]))
    write_folder(Path(out), export(by_path(restored.params), table), config)
    print(f"{out}: a {chosen.model_type}; transformers.{chosen.architecture}.from_pretrained({out!r}) reads it")


def expressed(family: Family, c: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """The config.json that says what a model section does; a UserError where this family has no words for it."""
    ours = spelled_out(c, vocab_size)
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "dtype": "float32",
        "vocab_size": vocab_size,
        "bos_token_id": None,  # theirs would end or begin texts with tokens that mean something else here
        "eos_token_id": None,
        "pad_token_id": None,
    } | family.config(ours)
    theirs = spelled_out(configs.resolve({"model": family.settings(config)}).model.to_dict(), vocab_size)
    for key, mine, other in differences(ours, theirs):
        raise UserError(f"a {family.model_type} cannot have {key} {mine!r}; allowed: {other!r}")
    return config


def find(c: dict[str, Any], vocab_size: int) -> Family:
    """The first family that has words for a model."""
    reasons = []
    for family in FAMILIES.values():
        try:
            expressed(family, c, vocab_size)
        except UserError as error:
            reasons.append(str(error))
            continue
        return family
    raise UserError(f"no family has words for this model: {'; '.join(reasons)}")
