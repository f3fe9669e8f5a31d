"""Whole models of transformers: their weights read here give the same logits, and ours read there."""

import jax
import numpy as np
import pytest
import torch
import transformers

from eval.export import exported
from eval.generate import generate
from eval.imported import imported
from eval.sample import Sampling

V, D, L = 61, 32, 24
SHARED = dict(vocab_size=V, hidden_size=D, num_hidden_layers=3)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip

GEMMA3 = dict(
    SHARED, **HEADS, head_dim=12, query_pre_attn_scalar=20, sliding_window=5, final_logit_softcapping=3.0,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
) | dict(num_hidden_layers=4)  # fmt: skip
BERT = dict(SHARED, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64)
T5 = dict(vocab_size=V, d_model=D, d_kv=6, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4)
VIT = dict(
    hidden_size=D, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=12, patch_size=4,
    num_channels=2, num_labels=7,
)  # fmt: skip

MODELS = {
    "llama": ("Llama", dict(SHARED, **HEADS, rope_parameters=LLAMA3, rms_norm_eps=1e-5)),
    "llama tied": ("Llama", dict(SHARED, **HEADS, tie_word_embeddings=True)),
    "llama with biases": ("Llama", dict(SHARED, **HEADS, attention_bias=True, mlp_bias=True, head_dim=12)),
    "gpt2": ("GPT2", dict(vocab_size=V, n_embd=D, n_layer=3, n_head=4, n_positions=64)),
    "gemma3": ("Gemma3", GEMMA3),
    "mixtral": ("Mixtral", dict(SHARED, **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=7)),
    "bert": ("Bert", BERT),
    "t5": ("T5", T5),
    "t5 gated": ("T5", T5 | dict(feed_forward_proj="gated-gelu")),
    "vit": ("ViT", VIT),
    "mamba": ("Mamba", dict(SHARED, state_size=5)),
    "mamba2": ("Mamba2", dict(SHARED, state_size=5, num_heads=8, head_dim=8, n_groups=1, chunk_size=8)),
}
GREEDY = ["gpt2", "gemma3", "t5", "mamba"]


def their_model(kind: str) -> torch.nn.Module:
    """A small model with random weights, none of them where it began: norms and biases count too."""
    name, settings = MODELS[kind]
    torch.manual_seed(0)
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**settings, **ends)
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


CONFIGS = {"Gemma3": "Gemma3TextConfig"}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration"}
CLASSES |= {"ViT": "ViTForImageClassification"}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """Their model, ours of its weights, and the name."""
    model, folder = their_model(request.param), tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, imported(str(folder)), request.param


def tokens(rows: int = 2, length: int = L) -> np.ndarray:
    return np.random.default_rng(1).integers(V, size=(rows, length))


def given(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What it is asked, by their names: token ids, a source and what was written, or pictures."""
    if isinstance(model, transformers.ViTForImageClassification):
        return {"pixel_values": np.random.default_rng(1).normal(size=(2, 2, 12, 12)).astype(np.float32)}
    if model.config.is_encoder_decoder:
        return {"input_ids": tokens(), "decoder_input_ids": tokens(length=9)}
    return {"input_ids": tokens()}


def their_logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(**{name: torch.tensor(x) for name, x in given(model).items()}).logits.numpy()


def our_logits(ours, pixel_values=None, input_ids=None, decoder_input_ids=None) -> np.ndarray:
    model, params = ours.run.model, {"params": ours.params}
    if pixel_values is not None:
        return model.apply(params, np.moveaxis(pixel_values, 1, -1))[0]
    if decoder_input_ids is not None:
        return model.apply(params, decoder_input_ids, source=input_ids)[0]
    return jax.jit(model.apply)(params, input_ids)[0]


def test_their_weights_give_their_logits(pair):
    model, ours, _ = pair
    np.testing.assert_allclose(our_logits(ours, **given(model)), their_logits(model), rtol=0, atol=1e-4)


def test_our_export_is_read_there(pair, tmp_path):
    model, ours, _ = pair
    exported(ours, out=str(tmp_path / "out"), family="")
    back = type(model).from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(their_logits(back), their_logits(model), rtol=0, atol=1e-4)


def test_greedy_tokens_are_theirs(pair):
    model, ours, kind = pair
    if kind not in GREEDY:
        pytest.skip("logits say it all")
    prompt = tokens(rows=1, length=8)
    # Their cache has as many layers as the encoder, and breaks where the decoder has more.
    options = dict(decoder_start_token_id=0, use_cache=False) if model.config.is_encoder_decoder else {}
    theirs = model.generate(torch.tensor(prompt), max_new_tokens=40, do_sample=False, **options)
    if options:  # the source, and the token that it begins to write with
        prompt = np.concatenate([prompt, [[0]]], axis=1)
    made = generate(ours.run.model, ours.params, prompt, 40, Sampling(temperature=0), jax.random.key(0))
    assert [int(token[0]) for token in made] == theirs[0, -40:].tolist()
