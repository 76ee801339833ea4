"""Frames of control messages: what is packed comes out again, and nothing else does."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrfp_jax.errors import PeerLost
from rrfp_jax.runtime.run.mailbox import HEADER, LARGEST_FRAME, Message, pack, pieces, unpack, whole
from rrfp_jax.runtime.run.membership import Echo, Failed
from tests.support.mailboxes import Note, joined, listening, note, noted, pump_until

pytestmark = pytest.mark.usefixtures("all_closed")

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(st.lists(plain | st.binary(), max_size=4), max_size=6)


class Gossip(Message, frozen=True):
    pass


def framed(body):
    return bytearray(len(body).to_bytes(HEADER, "big") + body)


def framed_as(kind, body):
    """A frame that says to be of a kind."""
    return framed(msgspec.msgpack.encode([kind, 0, body]))


class TestFrames:
    @given(messages, st.randoms(use_true_random=False))
    @settings(max_examples=50, deadline=None)
    def test_split_anywhere(self, contents, random):
        mailbox, ends = joined()
        heard = listening(mailbox)
        stream = b"".join(noted(*content) for content in contents)
        cuts = sorted(random.randrange(len(stream) + 1) for _ in range(6))
        for start, end in itertools.pairwise([0, *cuts, len(stream)]):
            ends[1].sendall(stream[start:end])
            mailbox.pump()
        assert heard == [(1, *content) for content in contents]
        mailbox.close()

    @given(messages)
    @settings(max_examples=50, deadline=None)
    def test_byte_by_byte(self, contents):
        buffer, found = bytearray(), []
        for byte in b"".join(noted(*content) for content in contents):
            buffer.append(byte)
            if (frame := unpack(buffer)) is not None:
                assert not buffer and frame.kind == "Note"
                found.append(msgspec.msgpack.decode(frame.body, type=Note))
        assert found == [note(*content) for content in contents]

    @given(st.binary(max_size=60))
    @example(b"\x92\xa1x\x81\x90\x01")  # a map whose key is a list
    @settings(max_examples=500, deadline=None)
    def test_garbage_is_refused_in_one_way(self, body):
        try:
            frame = unpack(framed(body))
        except ValueError:
            return
        assert isinstance(frame.kind, str) and isinstance(frame.channel, int)

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            ((LARGEST_FRAME + 1).to_bytes(4, "big"), f"a frame of {LARGEST_FRAME + 1} bytes"),
            (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
            (framed(b""), "no message"),
            (framed(b"\xc1"), "no message"),
            (framed(b"\x90\x90"), "no message"),
            (framed(b"\x90"), "no message"),
            (framed(b"\x91\x07"), "no message"),
            (framed(b"\x07"), "no message"),
            (framed(b"\x91" * 100_000), "no message"),
            (pack(Gossip()), "an unknown message 'Gossip'"),
            (noted(1, 2)[:-3] + b"\x92\x01\xc1", "no message"),
            (framed_as("Note", 1), "a message 'Note' that is none"),
            (framed_as("Note", [1]), "a message 'Note' that is none"),
            (framed_as("Echo", ["soon", None]), "a message 'Echo' that is none"),
            (framed_as("Echo", [1.0]), "a message 'Echo' that is none"),
            (framed_as("Failed", []), "a message 'Failed' that is none"),
            (framed_as("Failed", [1.5, "why"]), "a message 'Failed' that is none"),
            (framed_as("Failed", [1, b"why"]), "a message 'Failed' that is none"),
            (pack(note(1), channel=7), "an unknown message 'Note'"),
        ],
    )
    def test_a_bad_one_drops_the_peer(self, frame, reason):
        mailbox, ends = joined(others=(1, 2))
        heard = listening(mailbox)
        ends[1].sendall(noted("before") + frame + noted("after"))
        ends[2].sendall(noted("well"))
        pump_until(mailbox, lambda: len(heard) == 2)
        assert heard == [(1, "before"), (2, "well")]
        with pytest.raises(PeerLost, match=f"^rank 1 sent .*{reason}") as caught:
            mailbox.membership.require([1, 2])
        assert caught.value.culprit == 1
        mailbox.membership.require([2])

    def test_one_that_is_too_large_is_not_sent(self):
        mailbox, _ends = joined()
        with pytest.raises(ValueError, match=r"a message Note of 10\d{5} bytes"):
            mailbox.post(1, note(b"x" * LARGEST_FRAME))


def test_frames_hold_plain_data_only():
    with pytest.raises(TypeError, match="object is no plain data"):
        noted(object())
    assert whole(pieces([(1, 2), np.float64(0.5), {"a": np.int32(3)}])) == [[1, 2], 0.5, {"a": 3}]


@pytest.mark.parametrize("message", [Echo(1.0, 2.5), Failed(3, "so it is"), note([1], None)])
def test_what_a_message_says_is_what_it_was_given(message):
    frame = unpack(bytearray(pack(message, channel=5)))
    assert (frame.kind, frame.channel) == (type(message).__name__, 5)
    assert msgspec.msgpack.decode(frame.body, type=type(message)) == message
