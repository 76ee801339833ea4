"""Pipeline, tensor and data parallelism together: two stages, two devices in each, two replicas.

Start it with `python tp_dp.py`, or with more processes: `rrfp launch -n 8 tp_dp.py` (1, 2, 4 or 8).
"""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp


class Embed(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(16, 64, rngs=rngs)

    def __call__(self, carry, mb):
        return self.table(mb["digits"]).reshape(len(mb["digits"]), -1)  # two digits side by side


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(128, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

    def __call__(self, x, mb):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(128, 32, rngs=rngs)

    def __call__(self, x, mb):
        return self.out(x)


def loss(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["sum"])
    return rrfp.Loss(nll.sum(), weight=nll.size, metrics={"accuracy": (logits.argmax(-1) == mb["sum"]).sum()})


def data(step, microbatches=8, rows=32):  # replica 0 takes the even microbatches, replica 1 the odd ones
    digits = np.random.default_rng(step).integers(0, 16, (microbatches, rows, 2))
    return [{"digits": own, "sum": own.sum(-1)} for own in digits]


sharding = {"*.up.kernel": P(None, "tp"), "*.up.bias": P("tp"), "*.down.kernel": P("tp", None)}
layers = [rrfp.layer(Embed), rrfp.layer(Block, repeat=2), rrfp.layer(Head)]
pipe = rrfp.Pipeline(layers, loss, sharding=sharding)
mesh = rrfp.Mesh(pp=2, tp=2, dp=2, shard_optimizer=True)  # ZeRO-1: replicas share the optimizer's state
trainer = rrfp.Trainer(pipe, optax.adam(3e-3), data=data, mesh=mesh)
for report in trainer.steps(20):
    if trainer.is_main and report.step % 5 == 4:
        print(report)
if trainer.is_main:
    kernel = trainer.stage_params["1"]["up"]["kernel"]
    for shard in kernel.addressable_shards:
        print(f"{shard.device} has {shard.data.shape} of the kernel {kernel.shape} of layer 1")
    print(jax.process_count(), "process" if jax.process_count() == 1 else "processes")
