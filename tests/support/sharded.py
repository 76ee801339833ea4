"""Trainers whose stages have several devices, and whose pipelines have replicas."""

import jax
from jax.sharding import PartitionSpec as P

import rrfp_jax as rrfp
from tests.support import toy

SHARDING = {"*.up": P(None, "tp"), "*.down": P("tp", None), "-1.out": P("tp", None)}


def pipeline(**kwargs):
    return toy.pipeline(sharding=SHARDING, **kwargs)


def data(step):
    return toy.microbatches(8, seed=step)


def devices(pp, tp, dp):
    return dp * (sum(tp) if isinstance(tp, tuple) else pp * tp)


def trainer(pp=1, tp=2, dp=1, schedule="bfw", **kwargs):
    kwargs.setdefault("data", data)
    kwargs.setdefault("pipe", pipeline())
    mesh = rrfp.Mesh(pp=pp, tp=tp, dp=dp, share_devices=devices(pp, tp, dp) > 4)
    return toy.trainer(mesh=mesh, schedule=schedule, **kwargs)


def leaves(own):
    return jax.tree.leaves(whole(own.stage_params))


def whole(tree):
    return jax.device_get(tree)
