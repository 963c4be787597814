"""FP8 mixture-of-experts training for JAX.

The public names load on first use, so that `import octablox` is instant.
"""

import importlib
import sys
import types
from typing import Any

__version__ = "0.1.0"

# name -> the module that has it; the one list of what is public
_PUBLIC = {
    "gmm": "octablox.gmm",
    "Recipe": "octablox.fp8",
    "Cast": "octablox.fp8",
    "RECIPES": "octablox.fp8",
    "quantize": "octablox.fp8",
    "quantize_weight": "octablox.fp8",
    "dequantize": "octablox.fp8",
    "Config": "octablox.config",
    "load": "octablox.config",
    "UserError": "octablox.errors",
}


class _Package(types.ModuleType):
    """Keeps `octablox.gmm` the function: importing the module of that name would replace it."""

    @property
    def gmm(self) -> Any:
        return importlib.import_module("octablox.gmm").gmm

    @gmm.setter
    def gmm(self, module: types.ModuleType) -> None:
        pass  # what the import system does with a submodule


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'octablox' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return ["__version__", *_PUBLIC]
