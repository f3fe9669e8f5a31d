"""Small configs for every objective, over a text that each can learn."""

from pathlib import Path

from train import config as configs

DEBUG = "configs/debug.py"
L, B = 16, 8
# What each objective needs of a model, besides its own name.
NEEDS = {
    "task": [],
    "prefix_lm": [("objective.prefix_lm.prefix", "5"), ("model.attention.prefix", "5")],
    "masked": [("model.causal", "False")],
    "span_corruption": [("model.kind", "encoder_decoder")],
    "infilling": [("model.kind", "encoder_decoder")],
}


def load(text, kind: str, *overrides: tuple[str, str]):
    small = [("model.width", "16"), ("batch_size", str(B)), ("data.task", "text")]
    data = [("data.text.path", str(text)), ("data.text.length", str(L)), ("objective.kind", kind)]
    return configs.load(DEBUG, [*small, *data, *overrides])


def write_text(folder: Path) -> Path:
    """Two lines again and again: a byte follows from those before it, and from those around it."""
    path = folder / "text.txt"
    path.write_text("a cat sat on a mat\nthe dog did not\n" * 60)
    return path
