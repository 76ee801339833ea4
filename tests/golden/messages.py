"""What each rank dispatched, added and was told, in order; seeds choose among what may happen next."""

from rrfp_jax.core.events import ROOM, Arrived
from rrfp_jax.core.schedules import by_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.core.tasks import Placement
from tests.support.interleave import World

SEEDS = range(8)
STAGES, MICROBATCHES = 4, 8
CASES = {
    "bf": {},
    "bfw": {},
    "fb": {"chunks": 2, "shape": "v"},
    "1f1b": {},
    "zb-h1": {},
    "interleaved-1f1b": {"chunks": 2},
    "ranked:zb-v": {"chunks": 2, "shape": "v"},
    "bf, limited": {"schedule": "bf", "limit": 2},
    "bf, added on arrival": {"schedule": "bf", "accumulation": "arrival"},
    "bfw, two ranks by a leader": {"schedule": "bfw", "ranks": 2},
    "bfw, two ranks, unanimous": {"schedule": "bfw", "ranks": 2, "protocol": "unanimous"},
}


class Told(World):
    """A world that keeps what each rank is told: inputs by task, rooms and votes by how many in a row."""

    def tell(self, node, event):
        self.__dict__.setdefault("told", {}).setdefault(node, []).append(
            str(event.input) if isinstance(event, Arrived) else "room" if event == ROOM else "message"
        )
        super().tell(node, event)


def shortened(words):
    """Equal words in a row as one, with their number."""
    found = []
    for word in words:
        if found and found[-1][0] == word:
            found[-1][1] += 1
        else:
            found.append([word, 1])
    return [word if count == 1 else f"{word} x{count}" for word, count in found]


def orders(seed, name, schedule=None, chunks=1, shape="looped", ranks=1, protocol="leader", **given):
    rules = StepRules(
        placement=Placement(STAGES, chunks, shape),
        microbatches=MICROBATCHES,
        schedule=by_name(schedule or name),
        **{"limit": None if "1f1b" in name or "zb-h" in name else 2 * STAGES, **given},
    )
    world = Told(rules, seed, ranks=ranks, protocol=protocol).run()
    return [
        {
            "dispatched": " ".join(map(str, order)),
            "added": [list(one) for one in added],
            "told": shortened(world.told[node]),
        }
        for node, (order, added) in enumerate(zip(world.orders, world.added, strict=True))
    ]


TABLE = {
    name: lambda given, name=name, case=case: {f"seed {seed}": orders(seed, name, **case) for seed in SEEDS}
    for name, case in CASES.items()
}
