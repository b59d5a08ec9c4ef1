"""Imports point one way: examples -> jmoe.nn -> jmoe.layer -> {backends, experts} -> pallas_kernels."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def modules():
    """Dotted name -> file of every module of the two packages."""
    found = {}
    for package in ("jmoe", "pallas_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name, path, known, *, at_import_time=False):
    """Names of the modules that a module imports; those inside functions only if not at_import_time."""

    def visit(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if at_import_time and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                    package = package[: len(package) - (child.level - 1)]
                    base = ".".join([*package, base] if base else package)
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    yield full if full in known else base
            else:
                yield from visit(child)

    return sorted(set(visit(ast.parse(path.read_text()))))


MODULES = modules()
IMPORTS = {name: imports(name, path, MODULES) for name, path in MODULES.items()}


def within(name, *packages):
    return any(name == p or name.startswith(p + ".") for p in packages)


# (who, what they must not import)
UPWARD = [
    (("pallas_kernels",), ("jmoe", "flax", "rich", "examples")),
    (
        ("jmoe.backends", "jmoe.experts", "jmoe.policy", "jmoe.router", "jmoe.payload", "jmoe.plan", "jmoe.placement"),
        ("jmoe.layer", "jmoe.core", "jmoe.nn", "jmoe.linen", "jmoe.checkpoint", "jmoe.bench", "jmoe.cli", "flax"),
    ),
    (("jmoe.backends",), ("jmoe.experts",)),
    (("jmoe.experts",), ("jmoe.backends", "jmoe.plan", "jmoe.payload")),
    (("jmoe.layer", "jmoe.core", "jmoe.params"), ("jmoe.nn", "jmoe.linen", "jmoe.bench", "jmoe.cli", "flax", "rich")),
    (("jmoe.nn", "jmoe.linen", "jmoe.checkpoint"), ("jmoe.bench", "jmoe.cli", "jmoe.doctor")),
    (("jmoe",), ("examples", "tests", "torch", "transformers")),
]


@pytest.mark.parametrize("who, forbidden", UPWARD, ids=lambda names: "+".join(names)[:40])
def test_no_module_imports_what_is_built_on_it(who, forbidden):
    bench = ("jmoe.bench",)  # benchmarks load peers (torch), where they are installed
    importers = [m for m in MODULES if within(m, *who) and not within(m, *bench)]
    assert importers
    wrong = [f"{m} imports {t}" for m in importers for t in IMPORTS[m] if within(t, *forbidden)]
    assert not wrong, wrong


def test_modules_do_not_import_each_other_in_a_circle():
    edges = {
        name: [t for t in imports(name, path, MODULES, at_import_time=True) if t in MODULES and t != name]
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name, trail):
        # A package's own __init__ imports its modules; a module naming its package for a sibling is not a circle.
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for target in edges[name]:
            if not name.startswith(target + "."):
                visit(target, [*trail, name])
        done.add(name)

    for name in edges:
        visit(name, [])


def test_the_rules_see_relative_imports():
    assert "jmoe.config" in IMPORTS["jmoe.router"]
    assert any(within(t, "pallas_kernels") for t in IMPORTS["jmoe.policy.table"])
