"""Other people's weights, in and out: safetensors with the names and the `config.json` that transformers reads."""

from model.weights.family import Family
from model.weights.gemma3 import FAMILY as gemma3
from model.weights.llama import FAMILY as llama
from model.weights.mamba import FAMILY as mamba
from model.weights.mamba2 import FAMILY as mamba2

FAMILIES: dict[str, Family] = {family.model_type: family for family in (llama, gemma3, mamba, mamba2)}
