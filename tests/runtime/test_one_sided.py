"""One-sided transfers without a wire: the machines of both ends, in every order of events that is small."""

import pickle
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.nixl.memory import ALIGNMENT, packed
from rrfp_jax.nixl.receiver import Receiver, Slab
from rrfp_jax.nixl.sender import Ask, Dropped, Granted, Refused, Release, Sender, Unwanted, Write, Written
from rrfp_jax.runtime.run.mailbox import pack, unpack
from tests.verification.exploration.slots.faults import faults
from tests.verification.exploration.slots.space import SMALL, check_forged, explore
from tests.verification.exploration.slots.world import Case, actions, after, message_key, start
from tests.verification.exploration.visits import Violation

SPECS = (((ALIGNMENT,), "uint8"),)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: re.sub(r"^Case|\s", "", str(case)))
def test_every_state_is_as_it_must_be(case):
    assert explore(case, check=check_forged).whole


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.name)
def test_a_fault_is_found(fault):
    with pytest.raises(Violation, match=fault.said):
        explore(fault.case, fault.makers, check=check_forged)


def test_what_is_wrong_is_shown_by_the_shortest_way():
    fault = next(fault for fault in faults() if fault.name == "too small")
    with pytest.raises(Violation, match=r"too few, after: begin, offer 1, hear 1, answer 1$"):
        explore(fault.case, fault.makers)


SIZES = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=2, max_size=2)
CASES = st.builds(
    Case,
    sends=st.lists(SIZES, min_size=1, max_size=3),
    slots=st.integers(2, 6),
    ahead=st.integers(0, 3),
    resets=st.booleans(),
    deaths=st.booleans(),
)


@pytest.mark.slow(reason="2 s; test_every_state_is_as_it_must_be has smaller ones whole")
@settings(max_examples=60, deadline=None)
@given(CASES, st.randoms(use_true_random=False))
def test_long_ways_through_larger_cases(case, random):
    """Each step is judged; whatever was done, it ends, and then everybody has everything."""
    world, steps = start(case), 0
    while possible := list(actions(world)):
        usual = [action for action in possible if action[0] not in ("die", "kill", "break_", "reset")]
        rare = not usual or random.random() < 0.02
        world, steps = after(world, random.choice(possible if rare else usual)), steps + 1
        assert steps < 3000
    assert world.finished()
    check_forged(world)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["uint8", "bfloat16", "float32"]))
    ),
    st.integers(1, 4),
)
def test_arrays_lie_apart_and_in_turn(specs, devices):
    specs = tuple((tuple(shape), dtype) for shape, dtype in specs)
    parts, size = packed(specs, devices)
    assert [part.device for part in parts] == [i % devices for i in range(len(specs))]
    for device in range(devices):
        end = 0
        for part in parts:
            if part.device == device:
                assert part.offset >= end and part.offset % ALIGNMENT == 0
                end = part.offset + part.size
        assert end <= size


class TestSlots:
    @pytest.mark.parametrize(("size", "slot"), [(1, 1), (256, 1), (257, 2), (768, 0), (769, 3)])
    def test_the_smallest_that_is_large_enough(self, size, slot):
        receiver = Receiver([Slab([768, 256, 512, 1024], 1)], {0: 0})
        receiver.begin(1)
        (given,) = receiver.asked(1, Ask(1, message_key(1, 1, 0), (((size,), "uint8"),), ()))
        assert given.slot == slot

    def test_the_largest_grows(self):
        receiver = Receiver([Slab([300, 100, 400], 1)], {0: 0})
        receiver.begin(1)
        large = Ask(1, message_key(1, 1, 0), (((401,), "uint8"),), ())
        assert [type(one).__name__ for one in receiver.asked(1, large)] == ["Grow", "Give"]
        assert receiver._slabs[0].sizes == [300, 100, 512] and receiver._free(0) == [0, 1]
        receiver.release(1)
        again = receiver.asked(1, Ask(2, message_key(1, 1, 1), (((401,), "uint8"),), (2,)))
        assert [(type(one).__name__, one.slot) for one in again] == [("Give", 2)]


class TestSender:
    @pytest.fixture
    def sender(self):
        sender = Sender()
        sender.granted(0, Granted(1, 0, None, 4 * ALIGNMENT, ((0, 0),)))
        sender.granted(0, Granted(2, 0, None, ALIGNMENT, ((1, 0),)))
        return sender

    def test_it_takes_the_smallest_place_that_is_large_enough(self, sender):
        number, done = sender.offer(0, message_key(1, 1, 0), SPECS)
        assert done == []
        [write] = sender.produced(number, 0.0)
        assert write.place.place == 2

    def test_places_that_are_too_small_go_back(self, sender):
        _, [(_, ask)] = sender.offer(0, message_key(1, 1, 0), (((9 * ALIGNMENT,), "uint8"),))
        assert ask.returned == (1, 2)

    def test_places_are_of_one_rank_and_stage(self, sender):
        for rank, key in ((3, message_key(1, 1, 0)), (0, message_key(1, 1, 0)._replace(stage=5))):
            _, [(to, ask)] = sender.offer(rank, key, SPECS)
            assert (to, ask.key, ask.returned) == (rank, key, ())

    def test_a_place_that_was_there_is_kept_when_its_round_is_broken_off(self, sender):
        number, _ = sender.offer(0, message_key(1, 1, 0), SPECS)
        assert sender.reset(1) == [Release(number)]
        again, done = sender.offer(0, message_key(2, 1, 0), SPECS)
        assert done == [] and sender.produced(again, 0.0)[0].place.place == 2

    def test_what_was_not_asked_for_is_not_answered(self, sender):
        number, _ = sender.offer(0, message_key(1, 1, 0), SPECS)
        with pytest.raises(Refused, match=r"does not want the .*, for which it was not asked"):
            sender.unwanted(0, Unwanted(number))
        with pytest.raises(Refused, match="which needs none there"):
            sender.granted(0, Granted(9, 0, number, ALIGNMENT, ((0, 0),)))

    def test_another_rank_may_not_answer(self, sender):
        number, _ = sender.offer(3, message_key(1, 1, 0), SPECS)
        before = pickle.dumps(sender)
        for refused in (
            lambda: sender.granted(0, Granted(9, 0, number, ALIGNMENT, ((0, 0),))),
            lambda: sender.unwanted(0, Unwanted(number)),
        ):
            with pytest.raises(Refused, match="message 1, which was not offered to it"):
                refused()
        assert pickle.dumps(sender) == before

    def test_a_late_answer_is_written_at_once(self):
        sender = Sender()
        number, _ = sender.offer(0, message_key(1, 1, 0), SPECS)
        assert sender.produced(number, 1.0) == []
        place = Granted(1, 0, number, ALIGNMENT, ((0, 0),))
        assert sender.granted(0, place) == [Write(number, 0, SPECS, place)]


@pytest.mark.parametrize(
    "message",
    [
        Ask(1, message_key(1, 1, 0), SPECS, (3, 4)),
        Granted(1, 0, None, 256, ((2**63, 0), (1, 7)), b"\0\xff"),
        Unwanted(1),
        Written(1, message_key(1, 1, 0), SPECS, 0.5),
        Dropped(1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_as_they_were_sent(message):
    frame = unpack(bytearray(pack(message, 7)))
    assert (frame.kind, frame.channel) == (type(message).__name__, 7)
    assert msgspec.msgpack.Decoder(type(message)).decode(frame.body) == message
