"""Who is blamed for silence: all that still hear each other end by the same sentence, which is right."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.errors import PeerLost
from rrfp_jax.runtime.run.membership import Beat, Blame, Failed, Membership, Silent, blamed

LIMIT, BEAT, NOTICED = 25.0, 0.5, 4.0
HOSTS = ("n0", "n1", "n2", "n3")


@dataclass
class Rank:
    """One rank: when its watchdog ticks, how late its main thread notices, and how it has ended."""

    machine: Membership
    phase: float
    late: float
    since: float | None = None
    ended: Failed | None = None
    waiting: list = field(default_factory=list)  # (sender, what it said) that TCP has not brought yet


def run(nodes, dead, until, chances, frozen=()):
    """The ranks, after so many seconds in which links are dead when `dead(a, b, now)` says so."""
    count = len(nodes)
    ranks = [
        Rank(Membership(r, [o for o in range(count) if o != r], 0.0, LIMIT, nodes), *chances[r])
        for r in range(count)
    ]

    def say(sender, sends):
        for others, said in sends:
            for other in others:
                if isinstance(said, Beat):
                    if not dead(sender, other, now):
                        ranks[other].machine.heard(sender, now)
                else:
                    ranks[other].waiting.append((sender, said))

    def hear(r):
        for sender, said in [*ranks[r].waiting]:
            if not dead(sender, r, now):
                ranks[r].waiting.remove((sender, said))
                ranks[r].machine.heard(sender, now)
                say(r, ranks[r].machine.received(sender, said, now))

    for tenth in range(int(10 * until)):
        now = tenth / 10
        for r, rank in enumerate(ranks):
            if r in frozen or rank.ended:
                continue
            hear(r)
            if (now - rank.phase) % BEAT < 0.05:
                say(r, rank.machine.tick(now))
            if rank.machine.gone and rank.since is None:
                rank.since = now
            if rank.since is not None and now - rank.since >= rank.late:
                rank.ended = blame(rank.machine)
                say(r, rank.machine.end(rank.ended))
    return ranks


def blame(machine):
    """As a process that ends says it, which may wait for those alone that it does not hear."""
    unheard = [rank for rank, gone in machine.gone.items() if gone.how == "lost"]
    with pytest.raises(PeerLost) as lost:
        machine.require(unheard or machine.others)
    if machine.is_cut_off:
        return Failed(machine.rank, "cut off")
    return Failed(lost.value.culprit, str(lost.value))


def chances(count):
    tenths = st.integers(0, 4).map(lambda n: n / 10)
    late = st.integers(0, int(10 * NOTICED)).map(lambda n: n / 10)
    return st.lists(st.tuples(tenths, late), min_size=count, max_size=count)


@given(chances(4), st.integers(0, 3), st.integers(250, 330), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_after_an_outage_that_heals_nobody_blames_a_healthy_rank(chances, cut, lasts, begins):
    begins, lasts = 5 + begins / 10, lasts / 10
    for rank in run(
        HOSTS,
        lambda a, b, now: cut in (a, b) and begins <= now < begins + lasts,
        begins + lasts + 2 * NOTICED,
        chances,
    ):
        assert rank.ended is None or rank.ended.culprit == cut


@given(chances(4), st.integers(0, 240))
@settings(max_examples=30, deadline=None)
def test_an_outage_shorter_than_the_limit_ends_nothing(chances, lasts):
    ranks = run(HOSTS, lambda a, b, now: 1 in (a, b) and 5 <= now < 5 + lasts / 10, 45, chances)
    assert not any(rank.machine.gone for rank in ranks)
    assert all(not silent for rank in ranks for silent in rank.machine._silent.values())


@given(chances(4), st.permutations(range(4)), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_link_that_is_dead_is_named_by_all(chances, order, one_way):
    a, b = sorted(order[:2])
    ranks = run(
        HOSTS,
        lambda x, y, now: now > 5 and ((x, y) == (order[0], order[1]) or (not one_way and {x, y} == {a, b})),
        45,
        chances,
    )
    said = f"the connection between rank {a} (host n{a}) and rank {b} (host n{b}) was dead for 25 s"
    assert {rank.ended.sentence for rank in ranks} == {said}


@given(chances(4), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_a_frozen_rank_is_named_by_all(chances, frozen):
    ranks = run(HOSTS, lambda a, b, now: False, 45, chances, [frozen])
    said = f"rank {frozen} (host n{frozen}) has not been heard from for 25 s: frozen or cut off"
    assert {rank.ended.sentence for rank in ranks if rank.ended} == {said}
    assert sum(rank.ended is not None for rank in ranks) == 3


@given(chances(4), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_a_host_that_is_cut_off_is_named_with_its_ranks(chances, other):
    """Two ranks on each of two hosts, or a host with two among three."""
    nodes = ("n0", "n1", "n1", "n2")
    ranks = run(nodes, lambda a, b, now: now > 5 and (nodes[a] == "n1") != (nodes[b] == "n1"), 45, chances)
    said = "host n1 (ranks 1, 2) has not been heard from for 25 s: frozen or cut off"
    assert {ranks[r].ended.sentence for r in (0, 3)} == {said}
    assert {ranks[r].ended.culprit for r in (1, 2)} == {1}


def test_of_two_ranks_each_names_the_other_unless_that_says_that_it_lives():
    both = run(("n0", "n1"), lambda a, b, now: now > 5, 45, [(0.0, 0.0), (0.2, 1.0)])
    assert [rank.ended.culprit for rank in both] == [1, 0]
    one_way = run(("n0", "n1"), lambda a, b, now: now > 5 and b == 0, 45, [(0.0, 0.0), (0.2, 1.0)])
    said = "the connection between rank 0 (host n0) and rank 1 (host n1) was dead for 25 s"
    assert one_way[0].ended.sentence.startswith("rank 1 (host n1) has not been heard from")
    assert one_way[1].ended.sentence == said


def ranks(*each):
    return [frozenset([rank]) for rank in each]


TWO_EACH = [frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})]
SINGLE = ranks(*range(6))


@pytest.mark.parametrize(
    ("pairs", "alive", "hosts", "found"),
    [
        ({(0, 2), (1, 2)}, {0, 1}, SINGLE, Blame(ranks(2))),
        ({(2, 0), (2, 1)}, {2}, SINGLE, Blame(ranks(2))),
        ({(0, 2)}, {0, 1}, SINGLE, Blame(ranks(0, 2), link=True)),
        ({(0, 2)}, {0}, SINGLE, Blame(ranks(2))),
        ({(0, 2), (2, 0)}, {0}, SINGLE, Blame(ranks(0, 2), link=True)),
        ({(0, 2), (0, 3), (1, 2), (1, 3)}, {0, 1}, TWO_EACH, Blame(TWO_EACH[1:2])),
        ({(0, 2), (0, 3), (1, 2), (1, 3)}, {0, 1, 4}, TWO_EACH, Blame(TWO_EACH[:2], link=True)),
        ({(a, b) for a in (0, 1, 4, 5) for b in (2, 3)}, {0, 1, 4, 5}, TWO_EACH, Blame(TWO_EACH[1:2])),
        ({(0, 2), (1, 2), (3, 2)}, {0, 1, 3}, TWO_EACH, Blame(ranks(2))),
        ({(0, 1), (0, 3), (2, 1), (2, 3)}, {0, 2}, SINGLE, Blame(ranks(1, 3))),
    ],
)
def test_the_place_that_explains_all_is_blamed(pairs, alive, hosts, found):
    assert blamed(pairs, alive, hosts) == found


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda p: p[0] != p[1]), min_size=1))
def test_whoever_is_blamed_explains_every_pair(pairs):
    for hosts in (SINGLE, TWO_EACH, [frozenset(range(6))]):
        blame = blamed(pairs, {a for a, _ in pairs}, hosts)
        assert all({a, b} & frozenset().union(*blame.places) for a, b in pairs)
        assert not blame.link or len(blame.places) == 2


def test_what_was_said_of_silence_is_taken_back():
    machine = Membership(0, [1, 2], 0.0, LIMIT)
    assert machine.received(1, Silent((2,)), 1.0) == ()
    assert machine.received(1, Silent(()), 2.0) == () and machine._silent[1] == ()
