"""A whole T5 of `transformers` (https://arxiv.org/abs/1910.10683), with the same random weights as ours."""

import jax
import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from configs import base
from model import build, entries
from model.asked import Asked

V, D, H, K, F, LAYERS = 23, 16, 2, 6, 24, 3
SOURCE = np.random.default_rng(0).integers(1, V, (2, 40)).astype(np.int32)
TARGET = np.random.default_rng(1).integers(1, V, (2, 7)).astype(np.int32)
SEGMENTS = (np.arange(40) < np.array([[40], [25]])).astype(np.int32)


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    sizes = dict(d_model=D, d_kv=K, num_heads=H, d_ff=F, num_layers=LAYERS, num_decoder_layers=LAYERS)
    model = T5ForConditionalGeneration(T5Config(vocab_size=V, **sizes, dropout_rate=0.0, feed_forward_proj="relu"))
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model.eval()


def ours():
    c = base.get_config().model.to_dict()
    c |= dict(kind="encoder_decoder", width=D, layers=LAYERS, position="t5", mlp="relu", mlp_width=F)
    c |= dict(norm_eps=1e-6, logit_scale=D**-0.5)
    c |= entries.sections(c["mixers"], c["position"], c)
    for name in ("attention", "cross_attention"):
        c[name] |= dict(n_heads=H, head_dim=K, scale=1.0)
    c["t5"]["shared"] = True
    return build.build(c, Asked(V, source=SOURCE.shape[1]))


def weights(model: T5ForConditionalGeneration) -> dict:
    w = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}

    def stacked(pattern: str, *shape: int) -> np.ndarray:
        """Of all layers, each kernel transposed."""
        return np.stack([w[pattern.format(i)].T.reshape(shape) for i in range(LAYERS)])

    def attention(pattern: str) -> dict:
        into = {name: {"kernel": stacked(f"{pattern}.{name}.weight", D, H, K)} for name in "qkv"}
        return into | {"out": {"kernel": stacked(f"{pattern}.o.weight", H, K, D)}}

    def side(name: str, parts: dict[str, str]) -> dict:
        block = {}
        for i, (ours, theirs) in enumerate(parts.items()):
            layer = name + ".block.{}." + f"layer.{i}"
            block[f"{ours}_norm"] = {"scale": stacked(f"{layer}.layer_norm.weight", D)}
            if ours != "mlp":
                block[ours] = attention(f"{layer}.{theirs}")
                continue
            up, down = stacked(f"{layer}.{theirs}.wi.weight", D, F), stacked(f"{layer}.{theirs}.wo.weight", F, D)
            block[ours] = {
                "up": {"kernel": up, "bias": np.zeros((LAYERS, F), np.float32)},
                "down": {"kernel": down, "bias": np.zeros((LAYERS, D), np.float32)},
            }
        table = w[f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        return {"stack": {"layers": {"block_0": block}}, "position": {"table": table}}

    reading = {"mixer": "SelfAttention", "mlp": "DenseReluDense"}
    writing = {"mixer": "SelfAttention", "cross_attention": "EncDecAttention", "mlp": "DenseReluDense"}
    return {
        "embed": {"embedding": w["shared.weight"]},
        "encoder": side("encoder", reading),
        "encoder_norm": {"scale": w["encoder.final_layer_norm.weight"]},
        "decoder": side("decoder", writing),
        "norm": {"scale": w["decoder.final_layer_norm.weight"]},
    }


def test_logits(theirs):
    model, params = ours(), weights(theirs)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TARGET, source=SOURCE)["params"]
    assert jax.tree.structure(params) == jax.tree.structure(jax.tree.map(lambda x: 0, shapes, is_leaf=is_boxed))
    found, _ = model.apply({"params": params}, TARGET, source=SOURCE, source_segments=SEGMENTS)
    with torch.no_grad():
        wanted = theirs(
            input_ids=torch.tensor(SOURCE).long(),
            attention_mask=torch.tensor(SEGMENTS),
            decoder_input_ids=torch.tensor(TARGET).long(),
        ).logits
    assert wanted.std() > 0.1
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-4)


def is_boxed(leaf) -> bool:
    return hasattr(leaf, "unbox")


def test_greedy_generation(theirs):
    """20 tokens, each from the one before, the encoder's keys and values made once on either side."""
    model, variables, n = ours(), {"params": weights(theirs)}, 20
    run = jax.jit(model.apply)
    token, state, written = np.zeros((2, 1), np.int32), model.init_state(2, n), []
    given = dict(source=SOURCE, source_segments=SEGMENTS)
    for _ in range(n):
        logits, state = run(variables, token, state=state, **given)
        token, given = np.asarray(logits.argmax(-1), np.int32), {}
        written.append(token)
    with torch.no_grad():
        options = dict(max_new_tokens=n, eos_token_id=-1, do_sample=False, num_beams=1, decoder_start_token_id=0)
        wanted = theirs.generate(torch.tensor(SOURCE).long(), attention_mask=torch.tensor(SEGMENTS), **options)
    np.testing.assert_array_equal(np.concatenate(written, axis=1), wanted[:, 1:].numpy())
