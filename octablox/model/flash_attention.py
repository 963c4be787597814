"""Fused attention on TPU, by JAX's splash attention kernel: scores never reach HBM.

Shapes: B sequences, H heads, S tokens, K a head's query and key width, V its value width.
"""

import functools

import jax

# The public names check no device-varying types: outputs would have to name the axes they vary
# over. Its kernels are called with that check off, and their outputs are typed here.
from jax._src.config import _check_vma
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from octablox.kernels import vary_like
from octablox.kernels.pallas_tpu import chip

# Queries and keys of a block, the largest that divides S; what of the keys is computed at once.
# Of 512 and 1024, the faster by static schedules for TPU7x. One kernel for all three gradients is
# faster too, but leaves a sum over blocks of keys to XLA, which takes longer than the second does.
BLOCKS, COMPUTED_KEYS = (1024, 512, 256, 128), 512


def runs_on_target(sequence: int) -> bool:
    """Whether the device that is traced for has the kernel, and it takes sequences of S tokens."""
    return chip() is not None and sequence % BLOCKS[-1] == 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(
    q: Float[Array, "B H S K"],
    k: Float[Array, "B H S K"],
    v: Float[Array, "B H S V"],
    segment_ids: Int[Array, "B S"],
    interpret: bool = False,
) -> Float[Array, "B H S V"]:
    """Causal attention within segments; products in float32.

    Args:
      q: scaled queries.
      k: keys of each head.
      v: values of each head.
      segment_ids: int32; a token sees its own segment's tokens up to itself.
      interpret: run anywhere, slowly.
    """
    return _forward(q, k, v, segment_ids, interpret)[0]


def _forward(q, k, v, segment_ids, interpret):
    kernel = _kernel(*q.shape[1:3], interpret)
    settings = {**kernel.kwargs, "save_residuals": True}

    def one(q, k, v, ids):
        ids = splash.SegmentIds(ids, ids)
        return splash._splash_attention_forward(
            kernel.fwd_mask_info, q, k, v, ids, None, **settings
        )

    arrays = q, k, v, segment_ids
    with _check_vma(False):
        out, (logsumexp,) = jax.vmap(one)(*arrays)
    out, logsumexp = vary_like(arrays, out), vary_like(arrays, logsumexp)
    return out, (*arrays, out, logsumexp)


def _backward(interpret, residuals, dout):
    kernel = _kernel(*residuals[0].shape[1:3], interpret)

    def one(q, k, v, ids, out, logsumexp, dout):
        ids = splash.SegmentIds(ids, ids)
        saved = q, k, v, ids, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info
        return splash._splash_attention_bwd(res=saved, do=dout, **kernel.kwargs)[3:6]

    with _check_vma(False):
        grads = jax.vmap(one)(*residuals, dout)
    return *(vary_like((*residuals, dout), grad) for grad in grads), None


flash_attention.defvjp(_forward, _backward)


def _kernel(heads, sequence, interpret):
    block = next(block for block in BLOCKS if sequence % block == 0)
    computed = min(block, COMPUTED_KEYS)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=computed,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=computed,
        block_q_dq=block,
        block_kv_dq=block,
    )
    causal = masks.MultiHeadMask([masks.CausalMask((sequence, sequence))] * heads)
    return splash.make_splash_mha_single_device(causal, block_sizes=sizes, interpret=interpret)
