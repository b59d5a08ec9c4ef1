"""Swaps the dense Mixture-of-Experts layer of a Flax model for `jmoe.nn.MoE`, in three lines, and shows that nothing
changed.

    python examples/custom_layer.py

Runs on eight virtual CPU devices where there is no GPU. First the outputs and gradients of the two are compared, then
the dispatch is quantised to NVFP4.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys


def main(argv=None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    args = parser.parse_args(argv)
    if "jax" not in sys.modules:  # virtual devices must be asked for before JAX starts
        os.environ["XLA_FLAGS"] = (
            os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={args.devices}"
        )
    import jax
    import jax.numpy as jnp
    from dense_moe import DenseMoE
    from flax import nnx

    from jmoe.config import MoEConfig, QuantConfig
    from jmoe.nn import MoE

    class Model(nnx.Module):
        """Somebody's model, with a dense MoE in it."""

        def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
            d = config.hidden_size
            self.embed = nnx.Embed(256, d, rngs=rngs)
            self.norm = nnx.RMSNorm(d, rngs=rngs)
            self.moe = DenseMoE(config, rngs=rngs)
            self.head = nnx.Linear(d, 256, rngs=rngs)

        def __call__(self, ids):
            x = self.embed(ids)
            return self.head(x + self.moe(self.norm(x)))

    config = MoEConfig(hidden_size=64, intermediate_size=64, num_experts=16, num_experts_per_tok=4, dtype="float32")
    model = Model(config, rngs=nnx.Rngs(0))
    ids = jax.random.randint(jax.random.key(1), (8, 32), 0, 256)

    @jax.jit
    def run(model, ids):
        def loss(model):
            logits = model(ids)
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1).mean(), logits

        (_, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        return logits, grads.moe.down[...], grads.moe.router[...]

    def distance(a, b):
        """Relative Frobenius error."""
        return float(jnp.linalg.norm(jnp.ravel(a - b)) / jnp.linalg.norm(jnp.ravel(b)))

    before = run(model, ids)

    # The three lines. The arrays of DenseMoE have the names and shapes that MoE has, so that they can be handed over.
    mesh = jax.make_mesh((min(args.devices, jax.device_count()),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    dense, model.moe = model.moe, MoE(config, mesh=mesh, rngs=nnx.Rngs(0))
    nnx.update(model.moe, nnx.state(dense, nnx.Param))

    after = run(model, ids)
    errors = {name: distance(a, b) for name, a, b in zip(("logits", "d down", "d router"), after, before, strict=True)}
    print(f"{mesh.size} ranks against the dense layer, relative error:")
    print("  " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))

    # The same weights with NVFP4 rows on the wire. The layer's configuration says it, nothing else changes.
    quantised = dataclasses.replace(config, quant=QuantConfig(activations="nvfp4_token"))
    model.moe = MoE.from_params(quantised, model.moe.params, mesh=mesh)
    errors["nvfp4 logits"] = distance(jax.jit(lambda m, i: m(i))(model, ids), before[0])
    print(f"with NVFP4 rows on the wire, SNR of the logits: {-20 * math.log10(errors['nvfp4 logits']):.1f} dB\n")
    decision = model.moe.layer.decision(ids.size // mesh.size)
    print(f"travels as {decision.wire}, quantised by {decision.where}. {decision.reason}")
    return errors


if __name__ == "__main__":
    main()
