"""Programs of GPU tests, compiled side by side before the first test runs."""

import concurrent.futures
import os

import pytest


def compiled(item):
    """The program of a test that says how to build it; see `exchange_ranks.program_of`."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    run, arguments = item.function.build(**parameters)
    return run.lower(*arguments).compile()


@pytest.fixture(scope="session")
def programs(request):
    """By test: most take three seconds of one core, and little of the GPU.

    All are there before anything runs: a kernel may wait for one of another GPU while that is busy with loading code.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # which tests will be this process's is not known
        return {}
    items = [item for item in request.session.items if hasattr(item.function, "build")]
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return {item.nodeid: pool.submit(compiled, item) for item in items}


@pytest.fixture
def program(request, programs):
    """The test's program, ready to be called with arrays of all ranks."""
    ready = programs.get(request.node.nodeid)
    return ready.result() if ready else compiled(request.node)
