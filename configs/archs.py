"""Named architectures: what each changes in the model section of a config."""

from ml_collections import ConfigDict

from model.errors import choose

ARCHS = {
    "attention": dict(mixers=("attention",), position="rope"),  # multi-head softmax attention, rotary positions
    "alibi": dict(mixers=("attention",), position="alibi"),  # multi-head softmax attention, linear biases
    "mqa": dict(mixers=("attention",), position="rope", attention=dict(n_kv_heads=1)),  # one key-value head
    "window": dict(mixers=("attention",), position="rope", attention=dict(window=64)),  # each token sees the last 64
    "mla": dict(mixers=("mla",), position="rope"),  # multi-head latent attention: a compressed key-value cache
    "s4d": dict(mixers=("s4d",)),  # diagonal state space, the same at every token
    "mamba": dict(mixers=("mamba",), mlp="none"),  # selective state space, no MLP between the layers
    "hybrid": dict(mixers=("mamba", "attention")),  # alternating, positions from the recurrence alone
}


def use(config: ConfigDict, arch: str) -> None:
    """Writes a named architecture into a config's model section."""
    config.model.update(choose("arch", arch, ARCHS))
