"""Which configuration a kernel runs with: a table that ships, rows of a user's own table before it.

A rule holds for one kernel and weight format, up to a number of rows per occupied group and, where given, only for
certain N or K. The first rule that fits decides; nothing is measured here or at trace time. `jmoe bench grouped-matmul
--tune` writes a file of the same form.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SHIPPED = Path(__file__).with_name("tuning_sm90.json")
_FIELDS = {"kernel", "weights", "max_rows", "n", "k", "config"}


def read_rules(path: str | Path) -> tuple[Mapping[str, Any], ...]:
    """The rules of a tuning file. ValueError names the file and the rule that is malformed."""
    rules = json.loads(Path(path).read_text())["rules"]
    for i, rule in enumerate(rules):
        if not {"kernel", "config"} <= set(rule) <= _FIELDS:
            raise ValueError(
                f"{path}: rule {i} has the keys {sorted(rule)}; a rule has 'kernel' and 'config', and may have "
                f"{sorted(_FIELDS - {'kernel', 'config'})}."
            )
    return tuple(rules)


@functools.cache
def _shipped() -> tuple[Mapping[str, Any], ...]:
    return read_rules(_SHIPPED)


def rows_per_group(num_rows: int, num_groups: int) -> int:
    """Rows of an occupied group if rows spread evenly: with fewer rows than groups, one each."""
    return -(-num_rows // max(1, min(num_rows, num_groups)))


def lookup(
    kernel: str, *, weights: str, rows: int, n: int, k: int, extra: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Keyword arguments of the configuration of `kernel`; {} (its defaults) if no rule fits.

    weights: dtype or format name. rows: from `rows_per_group`. extra: rules that come before those that ship.
    """
    for rule in (*extra, *_shipped()):
        if rule["kernel"] != kernel or rule.get("weights", weights) != weights:
            continue
        if rows <= rule.get("max_rows", rows) and rule.get("n", n) == n and rule.get("k", k) == k:
            return dict(rule["config"])
    return {}
