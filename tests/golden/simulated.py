"""Simulated steps as plain numbers: every record of every task, by schedule."""

import rrfp_jax as rrfp

HINTS = ("bf", "bfw", "fb", "b-priority", "f-priority")
ORDERS = (
    *("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2"),
    *("zb-v", "v-half", "v-min", "v-zb", "dualpipe-v"),
)
NAMED = HINTS + ORDERS
RANKED = tuple(f"ranked:{name}" for name in ORDERS)
FAMILIES = ("constant", "log-normal", "multimodal", "slow-link")
LARGE = ("bf", "bfw", "1f1b", "ranked:zb-v")


def records(name, family="log-normal", **given):
    """Every task of the first step: where, which, when ready, dispatched, started and ended (s)."""
    chunks = 2 if "interleaved" in name else 1
    outcome = rrfp.simulate(family, [name], chunks=chunks, **given)[name]
    found = [
        [r.stage, str(r.task), r.ready, r.dispatched, r.start, r.end] for r in outcome.recorded.trace.records
    ]
    chosen = {"chosen": list(outcome.chosen)} if outcome.chosen else {}
    return {"records": found, "makespans": list(outcome.makespans), **chosen}


def small(name):
    """All families, and the paper's jitter, of 4 stages and 8 microbatches."""
    size = {"stages": 4, "microbatches": 8, "seeds": 2}

    def make(given):
        found = {family: records(name, family, **size) for family in FAMILIES}
        found["jitter"] = records(name, "constant", jitter="J2", **size)
        found["serial links"] = records(name, "slow-link", links="serial", **size)
        return found

    return make


TABLE = {f"4x8 {name}": small(name) for name in (*NAMED, *RANKED, "auto", "planned")}
TABLE |= {
    f"8x512 {name}": lambda given, name=name: records(name, stages=8, microbatches=512) for name in LARGE
}
