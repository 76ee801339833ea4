"""Losses in hex over 60 steps, and what is left at their end, in one process."""

import numpy as np

import rrfp_jax as rrfp
from tests.golden.small_models import MODELS, batches, digest, spread
from tests.support.toy import made

STEPS = 60
CASES = {
    **{name: {"schedule": name, "pp": 2} for name in ("bf", "1f1b", "bfw", "ranked:zb-v")},
    "interleaved": {"schedule": "interleaved-1f1b", "pp": 2, "chunks": 2},
    "bf, 4 stages": {"schedule": "bf", "pp": 4},
    "1f1b, 4 stages": {"schedule": "1f1b", "pp": 4},
    "remat": {"remat": "full"},
    "tied": {"model": "tied", "pp": 4},
    "frozen": {"model": "frozen", "schedule": "bfw"},
    "dropout": {"model": "dropout"},
    "dropout, bfw on 4 stages": {"model": "dropout", "schedule": "bfw", "pp": 4},
    "experts": {"model": "experts"},
    "images": {"model": "images"},
    "two buckets": {"model": "two buckets", "schedule": "bfw"},
    "zoo": {"model": "zoo, frozen and tied"},
    "bfloat16": {"model": "bfloat16"},
    "dp": {"dp": 2},
    "dp, state spread": {"dp": 2, "shard_optimizer": True, "clip_norm": 0.3},
    "tp": {"model": "spread", "tp": 2},
    "clip": {"clip_norm": 0.3, "schedule": "bfw"},
    "equal schedules": {"equal_schedules": True, "schedule": "1f1b"},
    "loss scale": {"loss_scale": "dynamic", "bad": (3, 20)},
    "loss scale of 8": {"loss_scale": 8.0},
    "bad steps are skipped": {"on_nonfinite": "skip", "clip_norm": 0.3, "bad": (5,)},
    "few in flight": {"max_in_flight": 1, "pp": 4},
}
IN_FOUR_PROCESSES = {
    **{name: {"schedule": name, "pp": 4} for name in ("bf", "1f1b", "bfw")},
    "ranked:zb-v": {"schedule": "ranked:zb-v", "pp": 4},
    "interleaved": {"schedule": "interleaved-1f1b", "pp": 4, "chunks": 2},
    "tied, clip": {"model": "tied", "pp": 4, "clip_norm": 0.3},
    "dropout": {"model": "dropout", "pp": 4},
    "dp": {"dp": 2},
    "tp": {"model": "spread", "tp": 2},
    "loss scale": {"loss_scale": "dynamic", "bad": (3, 20), "pp": 4},
}
"""On toys of at least 8 layers; see ranks.py."""

MESH = ("pp", "tp", "dp", "chunks", "shard_optimizer")


def trainer(model="toy", schedule="bf", **given):
    """A trainer by a model's name and flat arguments of mesh and Trainer; and the model's own data."""
    own = spread() if model == "spread" else MODELS[model]()
    mesh = rrfp.Mesh(**{"pp": 2, **{name: given.pop(name) for name in MESH if name in given}})
    data = without_a_number(own.data, given.pop("bad", ()))
    return made(own.pipe, own.optimizer, data=data, mesh=mesh, schedule=schedule, **given), own.data


def without_a_number(data, steps):
    """Data whose losses of some steps are not numbers."""
    if not steps:
        return data

    def given(step):
        first, *others = batches(step)
        return (
            [{**first, "mask": first["mask"] * np.float32("nan")}, *others]
            if step in steps
            else [first, *others]
        )

    return given


def trained(trainer, steps=STEPS):
    """What the steps said, to the bit."""
    reports = list(trainer.steps(steps))
    return {
        "losses": [report.loss.hex() for report in reports],
        "norms": [[r.gradient_norm.hex(), r.parameter_norm.hex()] for r in reports[:: steps // 6]],
        "metrics": {name: value.hex() for name, value in sorted(reports[-1].metrics.items())},
        "applied": [r.step for r in reports if not r.applied],
        "scales": sorted({r.loss_scale for r in reports}),
        "plan": reports[-1].plan,
        "weight": reports[-1].weight,
    }


def of_case(case):
    def golden(given):
        own, batch = trainer(**case)
        found = trained(own)
        return {**found, "parameters": digest(own), "evaluated": own.evaluate(batch, 1).loss.hex()}

    return golden


TABLE = {name: of_case(case) for name, case in CASES.items()}
