"""Weights in FP8 as DeepSeek-V3's checkpoints hold them: 128x128 blocks, a scale for each.

A weight is e4m3 [.., R, C] and its scales float32 [.., ceil(R/128), ceil(C/128)]; the last block
of a dim may be smaller. A weight's value is the 8-bit value *times* the scale, which files
therefore call `weight_scale_inv`. Blocks are square, so a transposed weight has the transposed
scales. The recipe `fp8_blockwise` has the same blocks.

In NumPy: checkpoints are converted without a device.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

BLOCK = 128
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = float(ml_dtypes.finfo(E4M3).max)


def grid(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a matrix [R, C]."""
    return tuple(-(-size // BLOCK) for size in shape)


def of_elements(
    scale: np.ndarray, shape: Sequence[int], index: Sequence[slice] | None = None
) -> np.ndarray:
    """The scale of each element of a part of a weight.

    Args:
      scale: of the whole weight; a dim that is as long as the weight's has a scale for each of its
        indices (experts; gate and up), another one for each block.
      shape: of the whole weight.
      index: the part, a slice of each dim; None: all.
    """
    for dim, size in enumerate(shape):
        at = np.arange(size)[index[dim] if index else slice(None)]
        scale = np.take(scale, at if scale.shape[dim] == size else at // BLOCK, axis=dim)
    return scale.astype(np.float32)


def dequantize(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32 [R, C] of e4m3 [R, C] and its scales [ceil(R/128), ceil(C/128)]."""
    return value.astype(np.float32) * of_elements(scale, value.shape)


def powers_of_two(scale: np.ndarray) -> bool:
    """Whether all scales are ("ue8m0")."""
    mantissa, _ = np.frexp(scale.astype(np.float32))
    return bool(np.all(mantissa == 0.5))


def quantize(weight: np.ndarray, power_of_two: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """A matrix [R, C] of any float dtype as e4m3 [R, C] and float32 scales.

    Each block's largest magnitude becomes 448, the largest of e4m3. A block of zeros has scale 1:
    a scale of 0 would divide by it, here and in whoever reads the file.

    Args:
      weight: finite.
      power_of_two: scales are rounded up to powers of two ("ue8m0").
    """
    weight = weight.astype(np.float32)
    rows, columns = weight.shape
    down, across = grid(weight.shape)
    whole = np.zeros((down * BLOCK, across * BLOCK), np.float32)
    whole[:rows, :columns] = np.abs(weight)
    amax = whole.reshape(down, BLOCK, across, BLOCK).max(axis=(1, 3))
    scale = amax / np.float32(_LARGEST)
    # Where the division underflows the block is as good as zero.
    scale = np.where(scale > np.finfo(np.float32).tiny, scale, np.float32(1))
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    # NumPy's cast does not saturate, and amax / (amax / 448) may be a hair above 448.
    scaled = np.clip(weight / of_elements(scale, weight.shape), -_LARGEST, _LARGEST)
    return scaled.astype(E4M3), scale
