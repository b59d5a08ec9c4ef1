"""The public names: all there, loaded late, and documented."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jmoe

ROOT = Path(__file__).parent.parent


def imported_for_type_checkers():
    """Name -> module of the imports under TYPE_CHECKING in jmoe/__init__.py."""
    tree = ast.parse((ROOT / "jmoe" / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    return {alias.asname: n.module for n in block.body for alias in n.names}


def test_type_checkers_see_the_names_that_are_there():
    assert imported_for_type_checkers() == jmoe._MODULES
    assert set(jmoe._MODULES) <= set(dir(jmoe)) and "__version__" in jmoe.__all__


@pytest.mark.parametrize("name", jmoe._MODULES)
def test_every_public_name_exists_and_says_what_it_is(name):
    assert getattr(jmoe, name).__doc__.strip()


def functions():
    """Every public function, and what makes or is called on an object of a public class, by name."""
    modules = "jmoe.checkpoint jmoe.formats jmoe.nn jmoe.rebalance pallas_kernels.all_to_all pallas_kernels.quantize"
    owners = [jmoe, *map(importlib.import_module, modules.split())]
    names = {f"{m.__name__}.{n}": getattr(m, n) for m in owners for n in getattr(m, "__all__", dir(m)) if n[0] != "_"}
    for name, value in names.items():
        if getattr(value, "__module__", "").startswith(("jmoe", "pallas_kernels")):
            if inspect.isfunction(value):
                yield name, value
            elif inspect.isclass(value):
                own = {n: m for n, m in vars(value).items() if n[0] != "_" or n in ("__init__", "__call__")}
                own = {n: getattr(m, "__func__", m) for n, m in own.items()}
                yield from ((f"{name}.{n}", m) for n, m in own.items() if inspect.isfunction(m))


def test_type_checkers_know_every_argument_of_public_functions():
    found = dict(functions())
    assert {"jmoe.build_moe", "jmoe.nn.MoE.from_params", "jmoe.formats.sqnr"} <= set(found) and len(found) > 60
    bare = [
        f"{name}({p})"
        for name, function in found.items()
        for p, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation is parameter.empty and p not in ("self", "cls")
    ]
    assert not bare


def test_a_name_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(AttributeError, match="no attribute 'MoELayr'; it has MoEConfig"):
        _ = jmoe.MoELayr


def test_importing_jmoe_or_asking_for_help_does_not_load_jax():
    check = "import sys; assert not {'jax', 'flax', 'numpy'} & set(sys.modules), 'loaded'"
    for code in ("import jmoe", "from jmoe import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass"):
        subprocess.run([sys.executable, "-c", f"{code}\n{check}"], check=True, capture_output=True, timeout=60)
