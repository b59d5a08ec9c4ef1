"""One progress bar, on stderr and only where someone can see it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    def advance(self, amount: float) -> None: ...


class _Silent:
    def advance(self, amount: float) -> None:
        pass


class _Bar:
    def __init__(self, bar, task):
        self._bar, self._task = bar, task

    def advance(self, amount: float) -> None:
        self._bar.advance(self._task, amount)


@contextlib.contextmanager
def progress_bar(what: str, total: float, *, show: bool | None = None) -> Iterator[Progress]:
    """A bar that `advance` moves. show: None shows it if stderr is a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield _Silent()
        return
    import rich.console
    import rich.progress as rp

    columns = (rp.TextColumn("{task.description}"), rp.BarColumn(), rp.MofNCompleteColumn(), rp.TimeRemainingColumn())
    with rp.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        yield _Bar(bar, bar.add_task(what, total=total))
