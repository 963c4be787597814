"""One direction of imports: config -> model -> schedule -> moe -> gmm -> kernels."""

import ast
import graphlib
from pathlib import Path

import pytest

import octablox

ROOT = Path(octablox.__file__).parent
# A module imports only from its own rank and from lower ones, and never in a circle.
RANKS = {
    0: "errors kernels",
    1: "fp8 mesh schedule layer_scan training_config",
    2: "gmm gmm_explicit",
    3: "moe",
    5: "model",
    6: "settings maxtext checks config presets",
    7: "train aot show",
    8: "cli __main__",
}
RANK = {name: rank for rank, names in RANKS.items() for name in names.split()}
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"  # public names: above everything
}


def top(module):
    """`fp8` of `octablox.fp8`, `moe` of `octablox.moe.router`."""
    return module.split(".")[1]


def imports(module):
    """octablox's modules that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES.keys()) or {node.module}
    return {name for name in found if name.startswith("octablox.")}


def test_every_module_has_a_rank():
    assert {top(module) for module in MODULES} - RANK.keys() == set()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    above = {name for name in imports(module) if RANK[top(name)] > RANK[top(module)]}
    assert above == set(), f"{module}, of rank {RANK[top(module)]}, imports from higher ranks"


def test_no_circles():
    graphlib.TopologicalSorter({m: imports(m) & MODULES.keys() for m in MODULES}).prepare()
