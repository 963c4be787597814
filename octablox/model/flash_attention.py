"""Fused attention on TPU, by JAX's splash attention kernel: scores never reach HBM.

Shapes: B sequences of W tokens, of which this device has the queries of S; H heads, K the width of
a head's query and key, V that of its value.
"""

import functools

import jax
from jax import lax

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def flash_attention(
    q: Float[Array, "B H S K"],
    k: Float[Array, "B H W K"],
    v: Float[Array, "B H W V"],
    segment_ids: Int[Array, "B W"],
    part: Int[Array, ""] | int = 0,
    interpret: bool = False,
) -> Float[Array, "B H S V"]:
    """Causal attention within segments; products in float32.

    Args:
      q: scaled queries, of tokens part*S to (part+1)*S of W.
      k: keys of each head.
      v: values of each head.
      segment_ids: int32; a token sees its own segment's tokens up to itself.
      part: which part of the sequence the queries are; traced, where it depends on the device.
      interpret: run anywhere, slowly.
    """
    return _forward(q, k, v, segment_ids, part, interpret)[0]


def _forward(q, k, v, segment_ids, part, interpret):
    kernel = _kernel(q.shape[1], q.shape[2], k.shape[2], interpret)
    settings = {**kernel.kwargs, "save_residuals": True}
    q_ids = lax.dynamic_slice_in_dim(segment_ids, part * q.shape[2], q.shape[2], axis=1)
    arrays = q, k, v, q_ids, segment_ids

    def one(q, k, v, q_ids, ids):
        return splash._splash_attention_forward(
            _of_part(kernel.fwd_mask_info, part, k.shape[1] // q.shape[1]),
            *(q, k, v, splash.SegmentIds(q_ids, ids), None),
            **settings,
        )

    with _check_vma(False):
        out, (logsumexp,) = jax.vmap(one)(*arrays)
    out, logsumexp = vary_like(arrays, out), vary_like(arrays, logsumexp)
    return out, (*arrays, part, out, logsumexp)


def _backward(interpret, residuals, dout):
    *residuals, part, out, logsumexp = residuals
    (heads, queries), keys = residuals[0].shape[1:3], residuals[1].shape[2]
    kernel = _kernel(heads, queries, keys, interpret)
    infos = kernel.dq_mask_info, kernel.dkv_mask_info
    infos = [_of_part(info, part, keys // queries) for info in infos]

    def one(q, k, v, q_ids, ids, out, logsumexp, dout):
        saved = q, k, v, splash.SegmentIds(q_ids, ids), None, out, logsumexp, *infos
        return splash._splash_attention_bwd(res=saved, do=dout, **kernel.kwargs)[3:6]

    arrays = *residuals, out, logsumexp, dout
    with _check_vma(False):
        grads = jax.vmap(one)(*arrays)
    return *(vary_like(arrays, grad) for grad in grads), None, None


flash_attention.defvjp(_forward, _backward)


def _of_part(info, part, parts):
    """Of what the kernel knows of a mask, what concerns the queries of one part."""
    if parts == 1:
        return info

    def cut(dim, a):
        size = a.shape[dim] // parts
        return lax.dynamic_slice_in_dim(a, part * size, size, dim)

    dims = {"data_next": 1, "mask_next": 1, "block_mask": 1, "q_sequence": 0}
    known = {name: dim for name, dim in dims.items() if getattr(info, name) is not None}
    return info._replace(**{name: cut(dim, getattr(info, name)) for name, dim in known.items()})


def _kernel(heads, queries, keys, interpret):
    block = next(block for block in BLOCKS if queries % block == 0)
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
    causal = masks.MultiHeadMask([masks.CausalMask((keys, keys))] * heads)
    return splash.make_splash_mha(
        causal,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=keys // queries,
        interpret=interpret,
    )
