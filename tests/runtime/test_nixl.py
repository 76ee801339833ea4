"""NIXL between two worlds in one process: what is tried at the start, what is refused, what memory does."""

import socket
import threading
from collections import Counter
from contextlib import closing
from functools import partial
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.core.tasks import FORWARD, Task
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.nixl import trial
from rrfp_jax.nixl.agent import Agent, MemoryRange, NixlAbsent, Sources, WriteFailed
from rrfp_jax.nixl.memory import ALIGNMENT, Slabs, memory_of, packed, zeros
from rrfp_jax.nixl.sender import Ask, Dropped, Written
from rrfp_jax.nixl.transport import NixlTransport
from rrfp_jax.runtime.programs.compiler import compiled_for
from rrfp_jax.runtime.programs.executables import Executables
from rrfp_jax.runtime.run.mailbox import Mailbox
from rrfp_jax.runtime.run.world import World
from rrfp_jax.runtime.transport.choice import between_processes
from rrfp_jax.runtime.transport.protocol import Endpoints, Key, by_jit

RECEIVERS = [[0], [1]]
SPECS = (((4,), "float32"),)


@pytest.fixture
def worlds(monkeypatch):
    """Two processes of a run, both in this one."""
    monkeypatch.setenv("RRFP_BIND", "127.0.0.1")
    pair = socket.socketpair()
    made = [World(rank, 2, Mailbox(rank, {1 - rank: end})) for rank, end in enumerate(pair)]
    yield made
    for world in made:
        world.mailbox.close()


def both(worlds, call):
    """What `call(world)` gives in both, each in its thread; errors are given, not raised."""
    found = [None, None]

    def run(world):
        try:
            found[world.rank] = call(world)
        except Exception as error:
            found[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return found


def chosen(worlds, name):
    def choose(world):
        devices = {world.rank: jax.devices()[world.rank : world.rank + 1]}
        return between_processes(name, Endpoints(world, RECEIVERS, devices, [1 - world.rank]))

    return both(worlds, choose)


def key(n, stage, round=7):
    return Key(round, stage, Task(FORWARD, 0, n).input)


class TestTrial:
    def test_where_it_works_it_is_taken_and_told(self, worlds):
        found = chosen(worlds, "auto")
        assert all(isinstance(one.transport, NixlTransport) for one in found), found
        assert found[0].details == found[1].details
        assert found[0].way == "by NIXL" and found[0].details.startswith("rank 0 to 1: ")
        kept = [one.transport.reserve({}) for one in found]
        assert all(own == {rank: kept[0][0]} for rank, own in enumerate(kept))

    def test_memory_that_cannot_be_registered_is_a_reason_for_sockets(self, worlds, monkeypatch):
        def refused(*_):
            raise WriteFailed("no more memory may be locked")

        monkeypatch.setattr(Agent, "register", refused)
        found = chosen(worlds, "auto")
        assert [type(one.transport).__name__ for one in found] == ["SocketTransport"] * 2
        assert "rank 0: NIXL cannot register memory: no more memory may be locked" in found[0].details

    @pytest.mark.parametrize("name", ["auto", "nixl"])
    def test_where_one_rank_lacks_it_all_know(self, worlds, monkeypatch, name):
        def absent(on_devices, here):
            if threading.current_thread().name == lacking:
                raise NixlAbsent("NIXL cannot be imported: no module")
            return Agent(on_devices, here)

        lacking = "lacks"
        monkeypatch.setattr(trial, "Agent", absent)

        def choose(world):
            threading.current_thread().name = lacking if world.rank else "has"
            devices = {world.rank: jax.devices()[world.rank : world.rank + 1]}
            return between_processes(name, Endpoints(world, RECEIVERS, devices, [1 - world.rank]))

        found = both(worlds, choose)
        if name == "auto":
            assert [type(one.transport).__name__ for one in found] == ["SocketTransport"] * 2
            assert found[0][1:] == ("by sockets, through hosts", "rank 1: NIXL cannot be imported: no module")
        else:
            assert all(isinstance(one, UsageError) for one in found)
            assert "transport='nixl': rank 1: NIXL cannot be imported" in str(found[0])

    def test_bytes_that_do_not_come_are_noticed(self, worlds, monkeypatch):
        monkeypatch.setattr(Agent, "write", lambda *_: lambda: True)
        found = chosen(worlds, "nixl")
        assert all("what lies there is something else" in str(one) for one in found)

    def test_a_write_has_a_limit(self, worlds, monkeypatch):
        monkeypatch.setattr(Agent, "write", lambda *_: lambda: False)
        monkeypatch.setattr(trial, "WRITE_SECONDS", 0.05)
        found = chosen(worlds, "nixl")
        assert all("rank 0 cannot write to rank 1: 4096 bytes were not written" in str(one) for one in found)

    def test_of_many_edges_the_slowest_is_told(self):
        edges = [trial.MeasuredEdge(n, n + 1, 1e-5, 1e9 * (n + 1)) for n in range(trial.MOST_TOLD + 1)]
        assert trial.speeds(edges) == "9 edges, the slowest rank 0 to 1: 10 us, 1.0 GB/s"


def test_between_machines(worlds, monkeypatch):
    """Where not all ranks are on this machine UCX watches for dead peers, and nothing stays registered."""
    monkeypatch.setattr(trial, "_all_here", lambda world: False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    sender, receiver = (own.transport for own in chosen(worlds, "nixl"))
    come = {}
    with closing(sender), closing(receiver):  # a thread watches writes that take longer
        for transport in (sender, receiver):
            transport.begin(7)
        for n in range(20):
            array = jax.block_until_ready(jnp.arange(10.0**3) * n)
            sender.offer(key(n, 1), [array])
            sender.produced(key(n, 1), 0.0)
            deadline = perf_counter() + 60.0
            while len(come) <= n and perf_counter() < deadline:
                sender.poll()
                come |= {arrival.key: arrival.arrays for arrival in receiver.poll()}
    assert not sender._sources._idle and not sender._agent.here
    assert come.keys() == {key(n, 1) for n in range(20)}
    for n in range(20):
        np.testing.assert_array_equal(come[key(n, 1)][0], np.arange(10.0**3, dtype=np.float32) * n)


def test_a_write_that_fails_after_the_end_keeps_nobody(worlds, monkeypatch):
    """Its receiver, which lives, hears that nothing more comes; both mailboxes let their transports go."""
    fails = threading.Event()

    def has_ended():
        if fails.is_set():
            raise WriteFailed("the way is broken")
        return False

    sender, receiver = transports = [own.transport for own in chosen(worlds, "nixl")]
    monkeypatch.setattr(Agent, "write", lambda *_: has_ended)

    def until(holds):
        deadline = perf_counter() + 60.0
        while not holds() and perf_counter() < deadline:
            for world in worlds:
                world.mailbox.pump()
        assert holds()

    for transport in transports:
        transport.begin(7)
    sender.offer(key(0, 1), [jax.block_until_ready(jnp.arange(8.0))])
    sender.produced(key(0, 1), 0.0)
    until(lambda: sender._writing)
    for transport in transports:
        transport.close()
    until(lambda: sender._gone == {1})
    assert not receiver._gone and all(own._number in own._mailbox._handlers for own in transports)
    fails.set()
    until(lambda: receiver._gone == {0})
    until(lambda: not any(own._number in own._mailbox._handlers for own in transports))


class TestRefusals:
    @pytest.fixture
    def transports(self, worlds):
        found = [one.transport for one in chosen(worlds, "nixl")]
        for transport in found:
            transport.begin(7)
        return found

    @pytest.mark.parametrize(
        ("message", "said"),
        [
            (
                Written(5, key(0, 0), SPECS, 0.0),
                "rank 1 says that the input of F0 on stage 0 is in place 5, which it does not have",
            ),
            (Dropped(1), "rank 1 drops its message 1, for which it has not asked"),
            (Ask(1, key(0, 1), SPECS, ()), "rank 1 sends the input of F0 on stage 1, which is not here"),
            (Ask(1, key(0, 0), SPECS, (3,)), "returns place 3, which it does not have"),
        ],
    )
    def test_what_nobody_may_say_is_refused_by_name(self, worlds, transports, message, said):
        worlds[1].mailbox.post(0, message, transports[1]._number)
        with pytest.raises(TrainingError, match=said):
            transports[0].poll()

    def test_a_stranger_is_refused_by_name(self, transports):
        stranger = Agent(False, True)
        stranger.peers[0] = transports[0]._agent.metadata
        stranger.name_of(0)
        stranger._agent.genNotif(transports[0]._agent.name, b"written", stranger._backends)
        with pytest.raises(TrainingError, match=f"notified by '{stranger.name}', and no process of this run"):
            for round in range(8, 1008):
                transports[0].begin(round)
                threading.Event().wait(0.01)


@pytest.fixture(scope="module")
def agent():
    return Agent(False, True)


class TestMemory:
    def slabs(self, agent, count=2):
        slabs = Slabs(agent, {0: jax.devices()[:count]}, by_jit, 2)
        slabs.grow(0, 0, 1024)
        slabs.grow(0, 1, 1024)
        return slabs

    def test_what_is_copied_is_no_view_of_the_slot(self, agent):
        """An array as large as its slot, of the slot's own dtype: JAX would hand it on."""
        slabs = self.slabs(agent, 1)
        (array,), _ = slabs.copy(0, 0, (((1024,), "uint8"),))
        before = np.array(array)
        slot = slabs._slots[0][0][-1].arrays[0]
        assert memory_of(array).address != memory_of(slot).address
        np.testing.assert_array_equal(before, 0)

    @pytest.mark.usefixtures("jax_keeps_nothing")
    def test_what_was_compiled_ahead_is_all_that_is_copied_by(self, agent, tmp_path):
        """A larger message comes later: slots grow for it, and smaller ones lie in what has grown."""
        device = jax.devices()[0]
        small, large = (((1024,), "uint8"),), (((500, 3), "float32"), ((), "int32"))
        stores = [Executables(tmp_path), Executables(tmp_path)]
        first, again = (partial(compiled_for, store) for store in stores)
        NixlTransport.compile_ahead({0: [device]}, first, {0: [small]}, {0: [large]})
        assert stores[0].compiles == 3  # of the larger only what copies out of a slot that has grown
        slabs = Slabs(agent, {0: [device]}, again, 2)
        slabs.grow(0, 0, packed(small, 1).size)
        slabs.grow(0, 1, packed(small, 1).size)
        slabs.prepare({0: [small]})
        slabs.prepare({0: [large]})
        slabs.grow(0, 1, packed(large, 1).size)
        made = dict(slabs._copiers._made)
        for slot, specs in [(0, small), (1, small), (1, large)]:
            slabs.copy(0, slot, specs)
        assert slabs._copiers._made == made and (stores[1].compiles, stores[1].loads) == (0, 3)

    def test_each_device_gets_its_own(self, agent):
        slabs = self.slabs(agent)
        specs = (((2, 3), "float32"), ((), "bool"), ((0,), "int8"), ((4,), "complex64"))
        arrays, tokens = slabs.copy(0, 1, specs)
        assert [array.device for array in arrays] == [*jax.devices()[:2], *jax.devices()[:2]]
        assert [(array.shape, array.dtype.name) for array in arrays] == list(specs)
        assert [token.device for token in tokens] == jax.devices()[:2]

    def test_a_rank_is_told_of_memory_once_and_again_when_it_has_changed(self, agent):
        slabs = self.slabs(agent)
        (at, metadata), (_, again) = slabs.address(1, 0, 0), slabs.address(1, 0, 0)
        assert metadata and not again
        assert slabs.address(2, 0, 0)[1]
        slabs.grow(0, 0, 10**6)
        grown_at, grown = slabs.address(1, 0, 0)
        assert grown and grown_at != at
        assert slabs.nbytes() == {0: 10**6 + 2 * 1024 + 3 * ALIGNMENT}  # with the one that it has outgrown

    def test_a_write_past_registered_memory_fails(self, agent):
        other = Agent(False, True)
        here, there = (zeros(4096, jax.devices()[0]) for _ in range(2))
        agent.register([memory_of(here)])
        other.register([memory_of(there)])
        agent.peers[1] = other.metadata
        past = memory_of(there)._replace(address=memory_of(there).address + 2048)
        with pytest.raises(WriteFailed, match="NOT_FOUND"):
            agent.write(1, [memory_of(here)], [past])

    def test_memory_is_registered_once_however_often_it_is_used(self, agent):
        memory = memory_of(jnp.ones(1000).block_until_ready())
        agent.register([memory, memory])
        agent.register([memory])
        for count in (2, 1, 0):
            assert agent._known[memory] == count + 1
            agent.release([memory])
        assert memory not in agent._known


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
