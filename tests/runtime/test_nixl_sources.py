"""What messages are written from by NIXL: it stays registered while it is used, and for a while after."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.nixl.agent import MemoryRange, Sources


class Registered:
    """An agent that notes what is registered (+) and released (-), by address."""

    def __init__(self, on_devices=False, here=True):
        self.on_devices, self.here, self.calls = on_devices, here, []

    def register(self, memory):
        self.calls += [f"+{each.address}" for each in memory]

    def release(self, memory):
        self.calls += [f"-{each.address}" for each in memory]


class TestSources:
    @pytest.fixture
    def sources(self, monkeypatch):
        monkeypatch.setattr("rrfp_jax.nixl.agent.MOST_IDLE", 2)
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
        return Sources(Registered())

    def at(self, address, size=10):
        return MemoryRange(address, size, 0)

    def test_memory_stays_registered_for_the_next_message(self, sources):
        for _ in range(3):
            sources.take([self.at(0)])
            sources.leave([self.at(0)])
        assert sources._agent.calls == ["+0"]

    def test_the_longest_unused_goes_first(self, sources):
        for address in (0, 20, 0, 40):
            sources.take([self.at(address)])
            sources.leave([self.at(address)])
        assert sources._agent.calls == ["+0", "+20", "+40", "-20"]

    def test_what_lies_there_now_is_something_else(self, sources):
        sources.take([self.at(0)])
        sources.leave([self.at(0)])
        sources.take([self.at(5), self.at(30)])
        assert sources._agent.calls == ["+0", "-0", "+5", "+30"]

    def test_what_goes_to_two_receivers_is_registered_as_often_as_it_is_released(self, sources):
        for call in (sources.take, sources.take, sources.leave, sources.leave):
            call([self.at(0)])
        assert sources._agent.calls == ["+0", "+0", "-0"]
        sources.take([self.at(0)])
        assert sources._agent.calls == ["+0", "+0", "-0"]

    def test_an_array_that_is_in_a_message_twice(self, sources):
        sources.take([self.at(0), self.at(0)])
        sources.leave([self.at(0), self.at(0)])
        sources.take([self.at(5)])
        assert sources._agent.calls == ["+0", "-0", "+5"]

    @pytest.mark.parametrize(("here", "networks"), [(False, "lo"), (True, "mlx5_0:1")])
    def test_what_would_be_pinned_is_let_go_at_once(self, monkeypatch, here, networks):
        monkeypatch.setenv("UCX_NET_DEVICES", networks)
        sources = Sources(Registered(here=here))
        sources.take([self.at(0)])
        sources.leave([self.at(0)])
        assert sources._agent.calls == ["+0", "-0"]

    @pytest.mark.parametrize(("allocator", "kept"), [("", True), ("platform", False)])
    def test_a_pool_that_jax_keeps(self, monkeypatch, allocator, kept):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
        sources = Sources(Registered(on_devices=True, here=False))
        sources.take([self.at(0)])
        sources.leave([self.at(0)])
        assert sources._agent.calls == ["+0"] + ["-0"] * (not kept)


class Counted(Registered):
    """An agent as NIXL's: memory is registered once, however often it is asked for."""

    def __init__(self):
        super().__init__()
        self.times = Counter()

    def register(self, memory):
        self.times.update(memory)

    def release(self, memory):
        self.times.subtract(memory)
        assert min(self.times.values()) >= 0


PLACES = st.builds(MemoryRange, st.integers(0, 90), st.integers(1, 9), st.integers(0, 1))
MESSAGES = st.lists(st.tuples(st.lists(PLACES, min_size=1, max_size=3), st.integers(0, 3)), max_size=40)


def collide(one, other):
    return one != other and one.overlaps(other)


def possible(memory, alive):
    """Arrays that are alive together lie apart; the same one may be in several messages."""
    found = []
    for each in memory:
        if not any(collide(each, other) for other in (*alive, *found)):
            found.append(each)
    return found


@given(messages=MESSAGES)
def test_what_is_written_from_is_registered_and_what_is_gone_is_not(messages):
    """Each message ends a little after it has been begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_NET_DEVICES", "lo")
        patch.setattr("rrfp_jax.nixl.agent.MOST_IDLE", 4)
        sources = Sources(Counted())
        times, under_way = sources._agent.times, []
        for wanted, ending in messages:
            memory = possible(wanted, [each for own in under_way for each in own])
            sources.take(memory)
            under_way.append(memory)
            assert all(times[each] > 0 for own in under_way for each in own)
            registered = [each for each, count in times.items() if count]
            assert not [old for old in registered for each in memory if collide(old, each)]
            for _ in range(min(ending, len(under_way))):
                sources.leave(under_way.pop(0))
        while under_way:
            sources.leave(under_way.pop())
        assert sum(times.values()) == len(sources._idle) <= 4
