"""Grouped-matmul kernels behind one contract, and the choice between them."""

from types import ModuleType

import jax

from octablox.kernels import pallas_tpu, pallas_tpu_interpret, ragged_dot, xla
from octablox.kernels.contract import (
    Product,
    Scaled,
    Unsupported,
    group_bounds,
    uninitialized,
    vary_like,
)

__all__ = [
    "BACKENDS",
    "Product",
    "Scaled",
    "Unsupported",
    "group_bounds",
    "run",
    "uninitialized",
    "vary_like",
]

# In order of preference of `auto`; the interpreter comes after one that refuses nothing.
BACKENDS: dict[str, ModuleType] = {
    "pallas_tpu": pallas_tpu,
    "xla": xla,
    "ragged_dot": ragged_dot,
    "pallas_tpu_interpret": pallas_tpu_interpret,
}


def run(product: Product, backend: str, *operands: Scaled | jax.Array, **settings) -> jax.Array:
    """Runs one product on the named backend, or with `auto` on the first that supports it.

    Args:
      product: "gmm" or "tgmm", see `contract.Backend`.
      backend: a key of `BACKENDS`, or "auto".
      *operands: lhs, rhs, group_sizes int32 [G], group_offset int32 [].
      **settings: the product's keyword arguments.

    Raises:
      ValueError: no backend supports the call; the message lists each refusal.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: expected auto or one of {sorted(BACKENDS)}, got {backend!r}")
    names = list(BACKENDS) if backend == "auto" else [backend]
    refusals = []
    for name in names:
        try:
            return getattr(BACKENDS[name], product)(*operands, **settings)
        except Unsupported as refusal:
            refusals.append(str(refusal))
    raise ValueError(f"no backend supports this {product}: " + "; ".join(refusals))
