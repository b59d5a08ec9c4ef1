"""Which configuration a kernel runs with: a table that ships, rows of a user's own table before it.

A rule holds for one kernel and weight format, up to a number of rows per occupied group and, where given, only for a
certain N or K, for multiples of some N, up to some K, or up to a number of weight rows (N of every group that can have
rows): few of them need finer tiles to reach all multiprocessors. Rules with "even_registers" are for a JAX under which
warpgroups keep an even share of the registers (compat.REGISTERS_MOVE). The first rule that fits decides; nothing is
measured here or at trace time.
`jmoe bench grouped-matmul --tune` writes a file of the same form.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import compat

#: A user's own rules, read once when the first configuration is chosen.
USER_FILE = Path("~/.config/jmoe/grouped_matmul_sm90.json").expanduser()
_SHIPPED = Path(__file__).with_name("tuning_sm90.json")
_WHERE = {"weights", "max_rows", "max_weight_rows", "n", "multiple_n", "k", "max_k", "even_registers"}


def read_rules(path: str | Path) -> tuple[Mapping[str, Any], ...]:
    """The rules of a tuning file. ValueError names the file and the rule that is malformed."""
    rules = json.loads(Path(path).read_text())["rules"]
    for i, rule in enumerate(rules):
        if not {"kernel", "config"} <= set(rule) <= {"kernel", "config"} | _WHERE:
            raise ValueError(
                f"{path}: rule {i} has the keys {sorted(rule)}; a rule has 'kernel' and 'config', and may have "
                f"{sorted(_WHERE)}."
            )
    return tuple(rules)


def write_rules(path: str | Path, rules: Sequence[Mapping[str, Any]]) -> None:
    """Writes a tuning file, and has it read again by the next choice."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"rules": list(rules)}, indent=1) + "\n")
    _rules.cache_clear()


@functools.cache
def _rules() -> tuple[Mapping[str, Any], ...]:
    mine = read_rules(USER_FILE) if USER_FILE.is_file() else ()
    return (*mine, *read_rules(_SHIPPED))


_forced: contextvars.ContextVar[Mapping[str, Mapping[str, Any]]] = contextvars.ContextVar("forced", default={})  # noqa: B039


@contextlib.contextmanager
def override(configs: Mapping[str, Mapping[str, Any]]):
    """Within it, the kernels named take these configurations whatever the rules say; for tuning and tests."""
    token = _forced.set(configs)
    try:
        yield
    finally:
        _forced.reset(token)


def rows_per_group(num_rows: int, num_groups: int) -> int:
    """Rows of an occupied group if rows spread evenly: with fewer rows than groups, one each."""
    return -(-num_rows // max(1, min(num_rows, num_groups)))


def lookup(
    kernel: str,
    *,
    weights: str,
    rows: int,
    n: int,
    k: int,
    weight_rows: int | None = None,
    extra: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Keyword arguments of the configuration of `kernel`; {} (its defaults) if no rule fits.

    weights: dtype or format name. rows: from `rows_per_group`. weight_rows: N times the groups that can have rows, None
        where that is unknown. extra: rules that come before those that ship.
    """
    if kernel in _forced.get():
        return dict(_forced.get()[kernel])
    for rule in (*extra, *_rules()):
        if rule["kernel"] != kernel or rule.get("weights", weights) != weights:
            continue
        if rule.get("even_registers", False) and compat.REGISTERS_MOVE:
            continue
        if "max_weight_rows" in rule and (weight_rows is None or weight_rows > rule["max_weight_rows"]):
            continue
        fits = rows <= rule.get("max_rows", rows) and rule.get("n", n) == n
        fits &= n % rule.get("multiple_n", 1) == 0
        if fits and rule.get("k", k) == k and k <= rule.get("max_k", k):
            return dict(rule["config"])
    return {}
