"""cuDNN's flash attention, called by its name in XLA (`__cudnn$fmhaSoftmax`), deterministic where that is asked for.

`jax.nn.dot_product_attention` makes the same calls, but does not tell them to be deterministic. XLA does, where a
program is compiled with `xla_gpu_exclude_nondeterministic_ops`; only, of several equal calls in a program it tells the
first, no longer finds the others and gives up (`IndexError: absl::container_internal::raw_hash_map<>::at`, jax 0.11).
Here all are told beforehand, by those who compile so: see `deterministic`.

Shape letters as in `attention`: L queries, M keys, H heads, G key-value heads. No mesh is known here: on one, it is
called on what a device holds.
"""

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

_DETERMINISTIC = ContextVar("deterministic", default=False)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Programs traced inside will be compiled with `xla_gpu_exclude_nondeterministic_ops` set to this."""
    token = _DETERMINISTIC.set(wanted)
    try:
        yield
    finally:
        _DETERMINISTIC.reset(token)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None, scale: float, causal: bool, window: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[B, L, H, K]` and log-sum-exps `[B, L, H]`; q: [B, L, H, K]; k, v: [B, M, G, K]; a narrow dtype.

    Only the first `lengths` `[B]` keys of each row, at least one, are seen; None: all. `window` is for causal
    attention: a query sees itself and the `window - 1` keys before; 0: all. No gradient runs through the log-sum-exps.
    """
    return flash_forward(q, k, v, lengths, scale, causal, window)[0]


def flash_forward(q, k, v, lengths, scale, causal, window):
    (B, L, H, _), V = q.shape, v.shape[-1]
    config = describe(q, k, lengths is not None, scale, causal, window, backward=False)
    results = [heads_first(B, L, H, V, q.dtype), jax.ShapeDtypeStruct((B, H, L), jnp.float32)]
    out, lse = call("__cudnn$fmhaSoftmax", config, results, q, k, v, *ends(q, lengths))
    return (out, jnp.swapaxes(lse, 1, 2)), (q, k, v, lengths, lse, out)


def flash_backward(scale, causal, window, saved, g):
    q, k, v, lengths, lse, out = saved
    config = describe(q, k, lengths is not None, scale, causal, window, backward=True)
    results = [heads_first(*x.shape, x.dtype) for x in (q, k, v)]
    operands = (q, k, v, lse, g[0], out, *ends(q, lengths))
    dq, dk, dv = call("__cudnn$fmhaSoftmaxBackward", config, results, *operands)
    if lengths is not None:  # what is behind them is not seen, and need not have been written
        seen = (jnp.arange(k.shape[1]) < lengths[:, None])[..., None, None]
        dk, dv = jnp.where(seen, dk, 0), jnp.where(seen, dv, 0)
    return dq, dk, dv, None


def ends(q: jax.Array, lengths: jax.Array | None) -> tuple[jax.Array, ...]:
    """Where queries and keys of each row end, `[B]` each; nothing where that is not asked. All queries count."""
    return () if lengths is None else (jnp.full(q.shape[:1], q.shape[1], jnp.int32), lengths)


flash_attention.defvjp(flash_forward, flash_backward)


def heads_first(B: int, L: int, H: int, K: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """How the calls name the axes of what they return; in memory, tokens still come before heads."""
    return jax.ShapeDtypeStruct((B, H, L, K), dtype)


def call(name: str, config: str, results: list[jax.ShapeDtypeStruct], *operands: jax.Array) -> list[jax.Array]:
    """The results, tokens first; each call has one more, a workspace that XLA sizes."""
    whole = [*results, jax.ShapeDtypeStruct((0,), jnp.uint8)]
    layouts = [(0, 2, 1, 3) if len(x.shape) == 4 else tuple(range(len(x.shape))) for x in whole]
    made = jax.ffi.ffi_call(
        name, whole, output_layouts=layouts, custom_call_api_version=2, legacy_backend_config=config
    )(*operands)
    return [jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x for x in made[:-1]]


# Contracted and batch axes of the products, of the left and the right operand; q, k, v are [B, L, H, K] and scores
# [B, H, L, M].
FORWARD = {
    "bmm1": (3, 3, (0, 2), (0, 2)),  # q, k -> scores
    "bmm2": (3, 1, (0, 1), (0, 2)),  # weights, v -> outputs
}
BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),  # d scores, q -> d k
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),  # d scores, k -> d q
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),  # weights, d outputs -> d v
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),  # d outputs, v -> d weights
}


MASKS = {  # by whether rows are padded, and whether they are causal
    (False, False): "NO_MASK",
    (False, True): "CAUSAL",
    (True, False): "PADDING",
    (True, True): "PADDING_CAUSAL",
}


def describe(q: jax.Array, k: jax.Array, padded: bool, scale: float, causal: bool, window: int, backward: bool) -> str:
    """The call's settings as XLA's `CudnnfMHABackendConfig` in JSON, where whole numbers of 64 bits are texts."""
    (B, L, H, _), M = q.shape, k.shape[1]
    products = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": [str(axis) for axis in left_batch],
            "rhs_batch_dimensions": [str(axis) for axis in right_batch],
        }
        for name, (left, right, left_batch, right_batch) in (BACKWARD if backward else FORWARD).items()
    }
    scores = {
        "element_type": {"bfloat16": "BF16", "float16": "F16"}[jnp.dtype(q.dtype).name],
        "dimensions": [str(size) for size in (B, H, L, M)],
        "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        "is_dynamic_dimension": [False] * 4,
    }
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": scores,
        "is_flash_attention": True,
        "mask_type": MASKS[padded, causal],
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
        **products,
    }
    if backward and _DETERMINISTIC.get():
        config["force_deterministic"] = True
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})
