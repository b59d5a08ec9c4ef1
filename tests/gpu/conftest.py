"""Programs of GPU tests, a batch of them compiled side by side before the first test of the batch runs."""

import concurrent.futures
import os

import pytest

BATCH = 16  # programs; most take three seconds of one core, and little of the GPU


def compiled(item):
    """The program of a test that says how to build it; see `exchange_ranks.program_of`."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    run, arguments = item.function.build(**parameters)
    return run.lower(*arguments).compile()


@pytest.fixture(scope="session")
def programs():
    """Futures of programs, by test."""
    return {}


@pytest.fixture
def program(request, programs):
    """The test's program, ready to be called with arrays of all ranks.

    Nothing compiles while a test runs: a kernel may wait for one of another GPU while that is busy with loading code.
    """
    wanted = request.node.nodeid
    if wanted not in programs:
        items = [item for item in request.session.items if hasattr(item.function, "build")]
        first = next(i for i, item in enumerate(items) if item.nodeid == wanted)
        # Of several processes each gets tests from all over the list, and only its own are worth compiling.
        count = 1 if "PYTEST_XDIST_WORKER" in os.environ else BATCH
        with concurrent.futures.ThreadPoolExecutor(min(BATCH, os.cpu_count() or 1)) as pool:
            for item in items[first : first + count]:
                programs[item.nodeid] = pool.submit(compiled, item)
    return programs.pop(wanted).result()
