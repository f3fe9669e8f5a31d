"""Weights that somebody trained: they go on with a story, and rank sentences, as transformers has it.

LONGVIEW_DATA names a folder with `stories15M/stories15M.bin` (https://huggingface.co/karpathy/tinyllamas, in the layout
of llama2.c) and `all-MiniLM-L6-v2/` (https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2).
"""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

from eval.attention import inside
from eval.generate import generate
from eval.imported import imported
from eval.sample import Sampling
from model.build import Model
from model.heads import pooled


def at_hand(name: str) -> Path:
    path = Path(os.environ.get("LONGVIEW_DATA", "")) / name
    if "LONGVIEW_DATA" not in os.environ or not path.exists():
        pytest.skip(f"LONGVIEW_DATA names no folder with {name}")
    return path


def opened(folder: Path) -> tuple[Model, Any]:
    """Our model and its parameters, on one of the devices that tests have: none is to do the others' work again."""
    ours = imported(str(folder))
    return ours.run.model, jax.device_put(ours.params, jax.devices()[0])


def llama2c(file: Path) -> transformers.LlamaForCausalLM:
    """A file of llama2.c as a model of transformers."""
    D, F, N, H, G, V, length = (int(n) for n in np.fromfile(file, np.int32, 7))
    assert V > 0 and H == G, "one matrix embeds and unembeds, and every head has its own keys"
    shapes = dict(embed=(V, D), norm=(N, D), q=(N, D, D), k=(N, D, D), v=(N, D, D), o=(N, D, D), mlp_norm=(N, D))
    shapes |= dict(gate=(N, F, D), down=(N, D, F), up=(N, F, D), last=(D,))
    flat, w = np.fromfile(file, np.float32, offset=28), {}
    for name, shape in shapes.items():
        w[name], flat = np.split(flat, [int(np.prod(shape))])
        w[name] = w[name].reshape(shape)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=N, num_attention_heads=H,
        max_position_embeddings=length, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    tensors = {"model.embed_tokens.weight": w["embed"], "lm_head.weight": w["embed"], "model.norm.weight": w["last"]}
    names = {"input_layernorm": "norm", "post_attention_layernorm": "mlp_norm", "self_attn.v_proj": "v"}
    names |= {"self_attn.o_proj": "o", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
    for n in range(N):
        for theirs, ours in names.items():
            tensors[f"model.layers.{n}.{theirs}.weight"] = w[ours][n]
        for name in "qk":  # it turns neighbours, where transformers turns dims half a head apart
            apart = w[name][n].reshape(H, D // H // 2, 2, D).swapaxes(1, 2).reshape(D, D)
            tensors[f"model.layers.{n}.self_attn.{name}_proj.weight"] = apart
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({name: torch.tensor(np.ascontiguousarray(x)) for name, x in tensors.items()})
    return model


def words(file: Path, tokens: list[int]) -> str:
    """The text of tokens, by llama2.c's table: a score, a length and as many bytes for each."""
    raw, at, table = file.read_bytes(), 4, []
    while at < len(raw):
        size = int.from_bytes(raw[at + 4 : at + 8], "little")
        table.append(raw[at + 8 : at + 8 + size])
        at += 8 + size
    return b"".join(table[token] for token in tokens).decode(errors="replace")


ONCE_UPON_A_TIME = [1, 9038, 2501, 263, 931]
NEW = 100  # tokens


def test_a_story_goes_on_token_for_token(tmp_path):
    file = at_hand("stories15M/stories15M.bin")
    model = llama2c(file)
    model.save_pretrained(tmp_path)
    ours, params = opened(tmp_path)
    prompt = np.array([ONCE_UPON_A_TIME])
    made = generate(ours, params, prompt, NEW, Sampling(temperature=0), jax.random.key(0))
    story = [int(token[0]) for token in made]
    theirs = model.generate(torch.tensor(prompt), max_new_tokens=NEW, do_sample=False)
    assert story == theirs[0, len(ONCE_UPON_A_TIME) :].tolist()
    assert words(file.with_name("tokenizer.bin"), story).startswith(", there was a little girl named Lily")


SENTENCES = [
    "A cat sleeps on the warm window sill.",
    "The kitten is napping by the window.",
    "Stock markets fell sharply on Monday.",
    "Shares dropped at the start of the week.",
    "She bakes bread every Sunday.",
    "How do I reset my password?",
]


def test_sentences_are_as_near_as_there():
    folder = at_hand("all-MiniLM-L6-v2")
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    given = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    mask = given["attention_mask"]
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    theirs = near(((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)).numpy())

    ours, params = opened(folder)
    tokens, segments = given["input_ids"].numpy(), mask.numpy().astype(np.int32)
    vectors = inside(ours, params, tokens, segments)[-1]["output"]
    mine = near(np.asarray(pooled(vectors, segments, "mean")))
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert (np.argsort(mine) == np.argsort(theirs)).all()
    assert mine[0, 1] > 0.5 and mine[2, 3] > 0.5 and mine[0, 2] < 0.1  # and it makes sense


def near(vectors: np.ndarray) -> np.ndarray:
    """Cosines of all pairs."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T
