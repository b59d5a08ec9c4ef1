"""Running over several processes: every wait has an end, and every end says why.

A collective waits for the other processes for ever, and NCCL does not notice that one of them is gone. What ends it:

* a process that dies or is stopped sends no heartbeats; after `silent_seconds` JAX's coordinator tells the others, and
  each of them ends with "another task died" and status 134 (SIGABRT). Where the transport itself notices (TCP between
  CPUs: at once), the collective raises, and `guarded` ends the process with the error and status 1.
* a process that lives and makes no progress still sends heartbeats; `deadline` ends those that wait for it, with
  status 75.
* a process that never comes ends `initialize` after `startup_seconds`, with status 75.

So put `initialize` first, `guarded` around the work and a `deadline` around each step: nothing waits longer than the
longest of the three. A launcher (SLURM's `srun --kill-on-bad-exit`) may then restart everything from a checkpoint; JAX
cannot go on with the processes that are left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

import jax

TIMEOUT_STATUS = 75  # EX_TEMPFAIL: trying again may help
ERROR_STATUS = 1


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    startup_seconds: int = 120,
    silent_seconds: int = 60,
) -> None:
    """`jax.distributed.initialize` that gives up in time.

    Arguments:
        coordinator_address: "host:port" of process 0; this, num_processes and process_id are found by JAX where a
            launcher that it knows (SLURM, MPI, Kubernetes) has started the processes.
        local_device_ids: the GPUs of this process (None: all that it sees; under SLURM one, with the number of the task
            on its node).
        startup_seconds: how long to wait for the other processes. silent_seconds: after how long without a heartbeat
            a process counts as dead, at least 10.

    Ends the process with status 75 where not all came in time. ValueError for times that cannot work.
    """
    if startup_seconds < 1 or silent_seconds < 10:
        raise ValueError(
            f"startup_seconds={startup_seconds} must be at least 1 and silent_seconds={silent_seconds} at least 10 "
            "(JAX sends heartbeats every few seconds)."
        )
    where = f" at {coordinator_address}" if coordinator_address else ""
    count = f"all {num_processes}" if num_processes else "all"
    what = (
        f"waiting for {count} processes to come to the coordinator{where} (is each of them started, with the same "
        "address, its own number, and no firewall in between?)"
    )
    with deadline(startup_seconds, what, process=process_id):
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids=None if local_device_ids is None else list(local_device_ids),
            initialization_timeout=startup_seconds + 30,  # ours comes first: JAX would abort with a stack trace
            heartbeat_timeout_seconds=silent_seconds,
            shutdown_timeout_seconds=silent_seconds,
        )


@contextlib.contextmanager
def deadline(seconds: float, what: str, *, process: int | None = None) -> Iterator[None]:
    """Ends this process with status 75 and a message if the block takes longer than `seconds`.

    what: what it would be waiting for, for the message. An exception cannot do this: the thread that waits for a
    collective is inside the runtime.
    """

    def expire() -> None:
        _leave(f"gave up after {seconds:g} s {what}.", TIMEOUT_STATUS, process)

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Ends this process at once, with the error and status 1, if the block raises.

    Without it Python would leave through JAX's shutdown, in which the process waits for those that are still at work.
    """
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        hint = ""
        if isinstance(error, jax.errors.JaxRuntimeError):
            hint = " If a collective failed, another process has ended: its own output says why."
        _leave(f"stopped by {type(error).__name__}.{hint}", ERROR_STATUS)


def _leave(message: str, status: int, process: int | None = None) -> None:
    known = jax.process_index() if process is None and jax.distributed.is_initialized() else process
    name = "this process" if known is None else f"process {known}"
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.write(2, f"jmoe: {name} {message}\n".encode())
    os._exit(status)
