"""Other people's weights, in and out: safetensors with the names and the `config.json` that transformers reads.

A family is a file: its `config.json` in our settings and back, and its table of names, which serves both ways.
"""

from model.weights import bert, gemma3, gpt2, llama, mamba, mamba2, mixtral, t5, vit
from model.weights.family import Family

FAMILIES: dict[str, Family] = {
    family.FAMILY.model_type: family.FAMILY for family in (llama, gpt2, gemma3, mixtral, bert, t5, vit, mamba, mamba2)
}
