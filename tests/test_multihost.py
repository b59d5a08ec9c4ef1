"""Several processes: the exchange between them, the example, and what happens when one dies, hangs or never comes."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from jmoe import distributed

ROOT = pathlib.Path(__file__).parent.parent
WORKER, EXAMPLE = ROOT / "tests" / "multihost_worker.py", ROOT / "examples" / "multihost.py"
PATIENCE = 200  # seconds that a test waits for its processes


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def started(*commands):
    """Processes that run Python with these arguments; whatever is still there at the end is killed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JMOE_TEST_GPU")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONUNBUFFERED"] = "1"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    processes = [subprocess.Popen([sys.executable, *map(str, c)], env=environment, **pipes) for c in commands]
    try:
        yield processes
    finally:
        for p in processes:
            p.kill()
            p.communicate()


def example(port, number, *options, processes=2):
    common = ["--cpu", "--coordinator", f"127.0.0.1:{port}", "--processes", processes, "--process", number]
    return [EXAMPLE, *common, *options]


def wait_for(process, text):
    """Reads the output of a process up to a line with `text`."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} was not written: {''.join(seen)}")


@pytest.mark.slow
def test_two_processes_of_four_devices_exchange_byte_for_byte_as_in_one_step():
    port = free_port()
    with started(*([WORKER, port, i] for i in range(2))) as processes:
        for process in processes:
            out, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0 and "all equal" in out, out
            assert out.count(": 0 bytes differ") == 3, out


@pytest.mark.slow
@pytest.mark.parametrize("number, devices", [(2, 4), (4, 1)], ids=("one for each host", "one for each device"))
def test_the_example_trains_over_the_processes_of_two_hosts_and_all_see_the_same_loss(number, devices):
    port = free_port()
    options = ["--local-devices", devices, "--steps", 6, "--tokens", 16, "--hidden", 32, "--experts", 16, "--hosts", 2]
    with started(*(example(port, i, *options, processes=number) for i in range(number))) as processes:
        outputs = [p.communicate(timeout=PATIENCE)[0] for p in processes]
        assert [p.returncode for p in processes] == [0] * number, outputs
    assert f"{number} processes, {number * devices} devices" in outputs[0]
    assert "between 2 hosts, once for each (token, host)" in outputs[0]
    losses = [
        float(line.split("loss ")[1].split(",")[0]) for line in outputs[0].splitlines() if line.startswith("step")
    ]
    assert len(losses) == 6 and losses[-1] < 0.98 * losses[0]
    last = [o.split(f"process {i} of {number}: done, loss ")[1].split()[0] for i, o in enumerate(outputs)]
    assert len(set(last)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, expected", [(signal.SIGKILL, "another process has ended"), (signal.SIGSTOP, "task died")]
)
def test_when_one_process_dies_or_stops_the_other_ends_with_an_error(how, expected):
    """Killed, its connections break; stopped, it sends no heartbeats."""
    port, silent = free_port(), 10
    options = ("--local-devices", 2, "--steps", 10**6, "--hidden", 16, "--experts", 4, "--tokens", 4, "--top-k", 1)
    with started(*(example(port, i, *options, "--silent", silent) for i in range(2))) as (left, lost):
        wait_for(left, "step 2")
        lost.send_signal(how)
        begin = time.monotonic()
        out, _ = left.communicate(timeout=silent + 60)
        assert time.monotonic() - begin < silent + 50
        assert left.returncode not in (0, None) and expected in out, out


def test_processes_that_never_come_are_not_waited_for():
    begin = time.monotonic()
    with started(example(free_port(), 0, "--startup", 3), example(free_port(), 1, "--startup", 3)) as processes:
        for number, process in enumerate(processes):
            out, _ = process.communicate(timeout=PATIENCE)
            assert process.returncode == distributed.TIMEOUT_STATUS, out
            assert f"process {number} gave up after 3 s waiting for all 2 processes to come" in out
    assert time.monotonic() - begin < PATIENCE


def test_a_block_past_its_deadline_and_an_error_under_guard_end_the_process():
    late = "import time; from jmoe import distributed as d\nwith d.deadline(0.2, 'in step 7'): time.sleep(60)"
    wrong = "from jmoe import distributed as d\nwith d.guarded(): raise KeyError('oops')\nprint('not reached')"
    fine = "import time; from jmoe import distributed as d\nwith d.guarded(), d.deadline(0.5, ''): pass\ntime.sleep(1)"
    with started(*(["-c", code] for code in (late, wrong, fine))) as processes:
        outputs = [p.communicate(timeout=PATIENCE)[0] for p in processes]
        assert [p.returncode for p in processes] == [distributed.TIMEOUT_STATUS, distributed.ERROR_STATUS, 0], outputs
    assert "gave up after 0.2 s in step 7" in outputs[0]
    assert "stopped by KeyError" in outputs[1] and "oops" in outputs[1] and "not reached" not in outputs[1]
    assert not outputs[2]


def test_times_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="silent_seconds=5 at least 10"):
        distributed.initialize(silent_seconds=5)
