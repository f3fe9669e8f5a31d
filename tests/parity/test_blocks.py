"""Whole models against transformers, for what stands around the mixers: the same weights, the same logits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from configs import base
from model import build, entries
from model.asked import Asked

D, H, G, K, F, V, LAYERS = 32, 4, 2, 8, 40, 20, 3


def kernel(weight, *shape):
    """Their `[out, in]` as ours `[in, ...out]`."""
    return weight.T.reshape(weight.shape[1], *shape) if shape else weight.T


def mapped(weights, name, *shape):
    """A linear map, with its bias if it has one."""
    found = {"kernel": kernel(weights[f"{name}.weight"], *shape)}
    if f"{name}.bias" in weights:
        found["bias"] = weights[f"{name}.bias"].reshape(shape or -1)
    return found


def norm(weights, name):
    scale = {"scale": weights[f"{name}.weight"]}
    return scale | ({"bias": weights[f"{name}.bias"]} if f"{name}.bias" in weights else {})


def attention(weights, name, out, kv_heads):
    heads = dict(q=H, k=kv_heads, v=kv_heads)
    into = {short: mapped(weights, f"{name}.{short}_proj", n, K) for short, n in heads.items()}
    last = mapped(weights, f"{name}.{out}")
    return into | {"out": last | {"kernel": last["kernel"].reshape(H, K, D)}}


def granite(w, layer):
    mlp = {
        ours: mapped(w, f"{layer}.mlp.{name}_proj") for ours, name in dict(up="gate", gate="up", down="down").items()
    }
    norms = dict(mixer_norm=norm(w, f"{layer}.input_layernorm"), mlp_norm=norm(w, f"{layer}.post_attention_layernorm"))
    return norms | dict(mixer=attention(w, f"{layer}.self_attn", "o_proj", G), mlp=mlp)


def phi(w, layer):
    mlp = dict(up=mapped(w, f"{layer}.mlp.fc1"), down=mapped(w, f"{layer}.mlp.fc2"))
    mixer = attention(w, f"{layer}.self_attn", "dense", H)
    return dict(mixer_norm=norm(w, f"{layer}.input_layernorm"), mixer=mixer, mlp=mlp)


def bloom(w, layer):
    name = f"{layer}.self_attention"
    w = dict(w)
    for part in ("weight", "bias"):  # a head's query, key and value stand together
        three = w[f"{name}.query_key_value.{part}"].reshape(H, 3, K, *[D] * (part == "weight"))
        w |= {f"{name}.{short}_proj.{part}": three[:, i].reshape(D, *three.shape[3:]) for i, short in enumerate("qkv")}
    mlp = dict(up=mapped(w, f"{layer}.mlp.dense_h_to_4h"), down=mapped(w, f"{layer}.mlp.dense_4h_to_h"))
    norms = dict(mixer_norm=norm(w, f"{layer}.input_layernorm"), mlp_norm=norm(w, f"{layer}.post_attention_layernorm"))
    return norms | dict(mixer=attention(w, name, "dense", H), mlp=mlp)


# Their model; of ours a layer's parameters, the settings, and where embedding and norms are in theirs.
MODELS = {
    "granite": (
        GraniteForCausalLM(
            GraniteConfig(
                hidden_size=D, num_attention_heads=H, num_key_value_heads=G, intermediate_size=F, vocab_size=V,
                num_hidden_layers=LAYERS, rms_norm_eps=0.01, attn_implementation="eager", tie_word_embeddings=True,
                embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0625, logits_scaling=8.0,
            )
        ),
        granite,
        dict(
            position="rope", mlp_width=F, norm_eps=0.01, embed_scale=12.0, branch_scale=0.22, logit_scale=1 / 8,
            attention=dict(n_heads=H, n_kv_heads=G, scale=0.0625),
        ),
        dict(layers="model.layers", embed="model.embed_tokens", norm="model.norm"),
    ),
    "bloom": (
        BloomForCausalLM(BloomConfig(hidden_size=D, n_head=H, n_layer=LAYERS, vocab_size=V)),
        bloom,
        dict(
            position="alibi", norm="layernorm", mlp="gelu", embed_norm="before",
            attention=dict(n_heads=H, bias="all"),
        ),
        dict(
            layers="transformer.h", embed="transformer.word_embeddings", norm="transformer.ln_f",
            embed_norm="transformer.word_embeddings_layernorm",
        ),
    ),
    "phi": (
        PhiForCausalLM(
            PhiConfig(
                hidden_size=D, num_attention_heads=H, num_hidden_layers=LAYERS, intermediate_size=F, vocab_size=V,
                attn_implementation="eager",
            )
        ),
        phi,
        dict(
            position="rope", norm="layernorm", mlp="gelu", mlp_width=F, parallel=True, tied=False, unembed_bias=True,
            rope=dict(fraction=0.5), attention=dict(n_heads=H, bias="all"),
        ),
        dict(layers="model.layers", embed="model.embed_tokens", norm="model.final_layernorm", unembed="lm_head"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits(name):
    theirs, layer, settings, places = MODELS[name]
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.tensor(0.3 * rng.normal(size=tuple(parameter.shape))))
        tokens = rng.integers(0, V, (2, 21))
        want = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    weights = {key: jnp.asarray(value.numpy()) for key, value in theirs.state_dict().items()}

    config = base.get_config().model.to_dict() | dict(width=D, layers=LAYERS) | settings
    sections = entries.sections(config["mixers"], config["position"])
    model = build.build(config | {key: made | config.get(key, {}) for key, made in sections.items()}, Asked(V))
    blocks = [layer(weights, f"{places['layers']}.{i}") for i in range(LAYERS)]
    params = {"stack": {"layers": {"block_0": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}}}
    params |= {"embed": {"embedding": weights[f"{places['embed']}.weight"]}, "norm": norm(weights, places["norm"])}
    if "embed_norm" in places:
        params["embed_norm"] = norm(weights, places["embed_norm"])
    if "unembed" in places:
        last = mapped(weights, places["unembed"])
        params |= {"unembed": {"kernel": last["kernel"]}, "unembed_bias": last["bias"]}
    made = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens))["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, made)  # every one of ours comes from theirs
    got, _ = jax.jit(model.apply)({"params": params}, jnp.asarray(tokens))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 1e-5, error
