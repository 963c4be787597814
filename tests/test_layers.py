"""One direction: a file imports only from lower layers, or from its own package without a cycle."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent / "octablox"

# From the lowest to the highest; a name that ends in a dot is all of a package.
LAYERS = [
    ["octablox.errors"],
    ["octablox.kernels.", "octablox.options"],
    [
        *("octablox.mesh", "octablox.fp8", "octablox.schedule", "octablox.training_config"),
        *("octablox.moe.config", "octablox.model.config", "octablox.fp8_blocks"),
        "octablox.computation",
    ],
    ["octablox.weights."],
    ["octablox.vjp", "octablox.gmm_explicit", "octablox.health"],
    ["octablox.layer_pass"],
    ["octablox.layer_scan"],
    ["octablox.gmm"],
    ["octablox.moe."],
    ["octablox.model.", "octablox.maxtext"],
    ["octablox.settings"],
    ["octablox.checks"],
    ["octablox.config", "octablox.presets."],
    ["octablox.train.", "octablox.show"],
    ["octablox.aot.", "octablox.compare."],
    [
        "octablox.bench.",
        "octablox.accuracy",
        "octablox.calibrate",
        "octablox.hf.",
        "octablox.generate",
    ],
    ["octablox.cli"],
    ["octablox.__main__"],
]
# The package itself is the version and names that load on use; anything may read the version.
TOP = "octablox"


def _modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["octablox", *path.relative_to(ROOT).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = _modules()


def _layer(module: str) -> int:
    exact = [i for i, names in enumerate(LAYERS) if module in names]
    prefix = [i for i, names in enumerate(LAYERS) if f"{module}.".startswith(_packages(names))]
    assert exact or prefix, f"{module} stands in no layer; add it to LAYERS"
    return (exact or prefix)[0]


def _packages(names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.endswith("."))


def _imports(path: pathlib.Path) -> set[str]:
    """The modules of octablox that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in members]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path.name} line {node.lineno}: a relative import")
        else:
            continue
        found |= {name for name in names if name in MODULES}
    return found


def test_every_module_has_one_layer():
    for module in MODULES:
        if module != TOP:
            places = [
                i
                for i, names in enumerate(LAYERS)
                if module in names or f"{module}.".startswith(_packages(names))
            ]
            exact = [i for i, names in enumerate(LAYERS) if module in names]
            assert len(exact or places) == 1, f"{module} stands in layers {places}"


def test_imports_go_down():
    wrong = []
    for module, path in MODULES.items():
        if module == TOP:
            continue
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for other in _imports(path) - {TOP}:
            same_package = package != TOP and f"{other}.".startswith(f"{package}.")
            if _layer(other) > _layer(module) or (
                _layer(other) == _layer(module) and not same_package
            ):
                wrong.append(f"{module} imports {other}")
    assert wrong == []


def test_no_cycles():
    edges = {module: _imports(path) - {TOP} for module, path in MODULES.items() if module != TOP}
    while edges:
        free = [module for module, others in edges.items() if not others & edges.keys() - {module}]
        assert free, f"a cycle among {sorted(edges)}"
        for module in free:
            del edges[module]


def test_importing_octablox_and_asking_for_help_import_no_jax():
    for module in (TOP, "octablox.cli", "octablox.__main__", "octablox.errors"):
        tree = ast.parse(MODULES[module].read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in top for alias in node.names}
        names |= {node.module for node in top if isinstance(node, ast.ImportFrom)}
        assert not names & {"jax", "octablox.config", "octablox.fp8", "octablox.gmm"}
