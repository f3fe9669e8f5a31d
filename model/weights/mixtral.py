"""Mixtral (https://arxiv.org/abs/2401.04088): a Llama of which every MLP is a mixture of experts."""

from typing import Any

from model.weights import llama
from model.weights.family import Config, Family, Model, Settings, need
from model.weights.names import TRANSPOSED, Row, row, stacked


def settings(config: Config) -> Settings:
    experts, chosen = need(config, "num_local_experts", "num_experts_per_tok")
    return llama.settings({"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, **config}) | {
        "mlp": "experts",
        "mlp_bias": None,
        "experts.n_experts": experts,
        "experts.top_k": chosen,
        "experts.kind": "swiglu",
        "attention.window": config.get("sliding_window"),
    }


def config(model: Model) -> dict[str, Any]:
    return llama.config(model) | {
        "num_local_experts": model.every("experts.n_experts") or 1,
        "num_experts_per_tok": model.every("experts.top_k") or 1,
        "sliding_window": model.every("window"),
    }


def rows(s: Settings) -> list[Row]:
    at, experts = "model.layers.{layer}.block_sparse_moe", range(s["experts.n_experts"])
    own = [row("layer/mlp/router/kernel", f"{at}.gate.weight", TRANSPOSED)]
    for ours, theirs in {"up": "w1", "gate": "w3", "down": "w2"}.items():
        each = tuple(f"{at}.experts.{i}.{theirs}.weight" for i in experts)
        own.append(row(f"layer/mlp/{ours}", each, TRANSPOSED >> stacked()))
    return [one for one in llama.rows(s) if not one.ours[0].startswith("layer/mlp/")] + own


FAMILY = Family("mixtral", "MixtralForCausalLM", "model.", settings, config, rows, llama.FAMILY.ignored)
