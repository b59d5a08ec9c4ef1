"""The kinds of experts there are, as data."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ExpertsSpec:
    """One kind of experts.

    form: what the dispatch must hand over: "standard" (rows [N, D] with the ids of each) or "batched" ([E, S, D], one
        block for each expert). expects_unquantized_inputs: the experts quantise their input themselves, after the
        permutation, so whatever travels must arrive unquantised. per_expert_input_scale: a per-tensor format may have a
        static input scale of its own for each expert (not where the input arrives quantised: one scale served it).
    weighted: the result is already multiplied with the routing weights and summed over a row's experts.
    """

    name: str
    form: Literal["standard", "batched"]
    expects_unquantized_inputs: bool
    per_expert_input_scale: bool
    weighted: bool


EXPERTS: dict[str, ExpertsSpec] = {
    spec.name: spec
    for spec in (
        ExpertsSpec(
            "grouped",
            form="standard",
            expects_unquantized_inputs=False,
            per_expert_input_scale=False,
            weighted=True,
        ),
        ExpertsSpec(
            "grouped_deferred",
            form="standard",
            expects_unquantized_inputs=True,
            per_expert_input_scale=True,
            weighted=True,
        ),
        ExpertsSpec(
            "batched",
            form="batched",
            expects_unquantized_inputs=False,
            per_expert_input_scale=True,
            weighted=False,
        ),
    )
}


def get_experts(name: str) -> ExpertsSpec:
    """The kind called `name`; ValueError lists those there are."""
    if name not in EXPERTS:
        raise ValueError(f"experts={name!r} is not known; choose one of {', '.join(map(repr, EXPERTS))}.")
    return EXPERTS[name]
