"""Draft heads: the form of an embedded MTP or EAGLE layer's experts, and one workspace for target and draft."""

from __future__ import annotations

from collections.abc import Sequence

from jmoe.layer import MoELayer
from jmoe.payload import Workspace
from jmoe.policy import draft_scheme

from .schemes import Scheme


def draft_format(
    module: str,
    *,
    per_token: bool,
    source_ignore: Sequence[str] = (),
    fp4_ignore: Sequence[str] = (),
    checkpoint_fp8: bool = False,
    is_moe: bool = True,
) -> str | None:
    """The weight format of a draft module beside a target that runs in NVFP4: "nvfp4", "fp8_128x128" or None.

    Args:
      module: name of the module, with or without a leading "model." (both are tried on both lists).
      per_token: the target quantises activations per token ("nvfp4_online"). Draft experts then inherit NVFP4 although
        the source checkpoint left them out, unless `fp4_ignore` names them.
      source_ignore: patterns that the source checkpoint's quantisation left out.
      fp4_ignore: patterns that are explicitly kept out of FP4. In per-token mode it does not include the source's.
      checkpoint_fp8: the checkpoint stores FP8, so that what is kept out of FP4 stays FP8.
      is_moe: False for linear layers, which follow the lists whatever the target does.
    """
    explicit = Scheme(ignore=tuple(fp4_ignore)).ignores(module)
    scheme = draft_scheme(
        per_token=per_token and is_moe,
        source_ignored=Scheme(ignore=tuple(source_ignore)).ignores(module),
        fp4_ignored=explicit,
        checkpoint_fp8=checkpoint_fp8,
    )
    return {"nvfp4": "nvfp4", "fp8": "fp8_128x128", "unquantised": None}[scheme]


def share_workspace(*layers: MoELayer, tokens: int) -> Workspace:
    """One set of exchange buffers for several layers (a target's and its draft's), each at `tokens` tokens on a rank.

    The size does not depend on the order. ValueError where top-k or the number of ranks differ.
    """
    if not layers:
        raise ValueError("share_workspace needs at least one layer.")
    out = None
    for layer in layers:
        mine = Workspace.of(layer.layout(tokens), num_ranks=layer.num_ranks, capacity=layer.exchange(tokens).capacity)
        out = mine if out is None else out.union(mine)
    assert out is not None
    return out
