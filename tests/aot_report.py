"""Runs one of the scripts aot_*.py in a process of its own, because each compiles for one kind of GPU once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def aot_report(script, *arguments):
    """The JSON object that a script of tests/ prints last; skips where it says that the compiler is absent (77)."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=environment,
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
