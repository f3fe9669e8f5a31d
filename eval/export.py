"""A checkpoint written for others: safetensors and the config.json that transformers reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.restore import Restored
from model.asked import Asked
from model.errors import UserError
from model.paths import by_path
from model.weights import FAMILIES
from model.weights.family import Family, differences, spelled_out
from model.weights.names import export, links, stacks
from model.weights.safetensors import write_folder
from train import config as configs


def exported(restored: Restored, *, out: str, family: str) -> None:
    """The suite: writes a new folder, and prints how transformers reads it."""
    if not out:
        raise UserError("--out is missing: the folder to write, e.g. --out=exported")
    run = restored.run
    c, asked = run.config.model.to_dict(), replace(run.objective.asked, vocab_size=run.model.vocab_size)
    chosen = FAMILIES[family] if family else find(c, asked)
    config = expressed(chosen, c, asked)
    table = links(chosen.rows(chosen.settings(config)), stacks(c))
    write_folder(Path(out), export(by_path(restored.params), table), config)
    print(f"{out}: a {chosen.model_type}; transformers.{chosen.architecture}.from_pretrained({out!r}) reads it")


def expressed(family: Family, c: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """The config.json that says what a model section does; a UserError where this family has no words for it."""
    ours = spelled_out(c, asked)
    config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "dtype": "float32",
        "vocab_size": asked.vocab_size,
        "bos_token_id": None,  # theirs would end or begin texts with tokens that mean something else here
        "eos_token_id": None,
        "pad_token_id": None,
    } | family.config(ours)
    answered = family.asked(config)
    for field in ("n_classes", "labels", "inputs", "image", "values", "pair"):
        if getattr(asked, field) != getattr(answered, field):
            raise UserError(
                f"a {family.model_type} has {field} {getattr(answered, field)!r}, and this model was trained for "
                f"{getattr(asked, field)!r}"
            )
    resolved = configs.resolve({"model": family.settings(config)}).model.to_dict()
    for key, mine, other in differences(ours, spelled_out(resolved, asked)):
        raise UserError(f"a {family.model_type} cannot have {key} {mine!r}; allowed: {other!r}")
    return config


def find(c: dict[str, Any], asked: Asked) -> Family:
    """The first family that has words for a model."""
    reasons = []
    for family in FAMILIES.values():
        try:
            expressed(family, c, asked)
        except UserError as error:
            reasons.append(str(error))
            continue
        return family
    raise UserError(f"no family has words for this model: {'; '.join(reasons)}")
