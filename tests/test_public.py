"""The public names: all there, loaded late, and documented."""

import ast
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


def test_a_name_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(AttributeError, match="no attribute 'MoELayr'; it has MoEConfig"):
        _ = jmoe.MoELayr


def test_importing_jmoe_or_asking_for_help_does_not_load_jax():
    check = "import sys; assert not {'jax', 'flax', 'numpy'} & set(sys.modules), 'loaded'"
    for code in ("import jmoe", "from jmoe import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass"):
        subprocess.run([sys.executable, "-c", f"{code}\n{check}"], check=True, capture_output=True, timeout=60)
