"""Casts that are left out: layers, GEMMs or operands that stay in the model's dtype, by pattern.

A cast's name is LAYER.GEMM.OPERAND, as in the health that a run logs: `layers.3.down.drhs_grad`,
`mtp.0.gate_up.act`. The router, attention and dense layers are cast by no recipe.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from octablox.errors import UserError
from octablox.fp8 import Recipe
from octablox.health import OPERANDS
from octablox.moe.experts import GEMMS


def parse(text: str) -> tuple[str, ...]:
    """The patterns of `quantization_skip`: with commas between, `*` stands for anything."""
    return tuple(pattern.strip() for pattern in text.split(",") if pattern.strip())


def recipes_of(recipe: Recipe, patterns: Iterable[str], layer: str) -> tuple[Recipe, ...]:
    """One layer's recipe for each of `GEMMS`: `recipe` less the casts that a pattern names."""
    patterns = tuple(patterns)
    found = []
    for gemm in GEMMS:
        names = {operand: f"{layer}.{gemm}.{operand}" for operand in OPERANDS}
        skipped = [operand for operand, name in names.items() if _matches(name, patterns)]
        found.append(recipe.model_copy(update=dict.fromkeys(skipped)))
    return tuple(found)


def require_matches(patterns: Sequence[str], layers: Iterable[str]) -> None:
    """Raises UserError where a pattern names no cast of these layers."""
    names = [
        f"{layer}.{gemm}.{operand}" for layer in layers for gemm in GEMMS for operand in OPERANDS
    ]
    for pattern in patterns:
        if not any(_matches(name, (pattern,)) for name in names):
            close = difflib.get_close_matches(pattern, names, n=2, cutoff=0.4) or names[:1]
            hint = (
                f"such as {' or '.join(close)}, or patterns as *.down.*" if names else "none here"
            )
            raise UserError(
                f"quantization_skip: expected names of casts, {hint}; got {pattern!r}, which names "
                "none"
            )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern names the cast, or all of the GEMM or layer that it belongs to."""
    return any(fnmatch.fnmatchcase(name, whole) for p in patterns for whole in (p, f"{p}.*"))
