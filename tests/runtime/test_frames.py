"""Frames of control messages: what is packed comes out again, and nothing else does."""

import itertools

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rrfp_jax.errors import PeerLost
from rrfp_jax.runtime.processes.frames import LARGEST_FRAME, pack, unpack
from tests.support.mailboxes import joined, listening, pump_until

pytestmark = pytest.mark.usefixtures("all_closed")

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(st.lists(plain | st.binary(), max_size=4), max_size=6)


class TestFrames:
    @given(messages, st.randoms(use_true_random=False))
    @settings(max_examples=50, deadline=None)
    def test_split_anywhere(self, contents, random):
        mailbox, ends = joined()
        heard = listening(mailbox)
        stream = b"".join(pack("note", *content) for content in contents)
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
        for byte in b"".join(pack("note", *content) for content in contents):
            buffer.append(byte)
            if (message := unpack(buffer)) is not None:
                assert not buffer
                found.append(message)
        assert found == [["note", *content] for content in contents]

    @given(st.binary(max_size=60))
    @example(b"\x92\xa1x\x81\x90\x01")  # a map whose key is a list
    @settings(max_examples=500, deadline=None)
    def test_garbage_is_refused_in_one_way(self, body):
        try:
            message = unpack(bytearray(len(body).to_bytes(4, "big") + body))
        except ValueError:
            return
        assert isinstance(message[0], str)

    @pytest.mark.parametrize(
        ("frame", "reason"),
        [
            ((LARGEST_FRAME + 1).to_bytes(4, "big"), f"a frame of {LARGEST_FRAME + 1} bytes"),
            (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
            (b"\0\0\0\0", "not msgpack"),
            (b"\0\0\0\1\xc1", "not msgpack"),
            (b"\0\0\0\2\x90\x90", "not msgpack"),
            (b"\0\0\0\1\x90", "no message"),
            (b"\0\0\0\2\x91\x07", "no message"),
            (b"\0\0\0\1\x07", "no message"),
            (pack("note", {1: 2})[:-3] + b"\x81\x90\x01", "not msgpack"),
            (pack("gossip"), "an unknown message 'gossip'"),
            (pack("echo", "soon", None), "an unknown message 'echo'"),
            (pack("failed"), "an unknown message 'failed'"),
        ],
    )
    def test_a_bad_one_drops_the_peer(self, frame, reason):
        mailbox, ends = joined(others=(1, 2))
        heard = listening(mailbox)
        ends[1].sendall(pack("note", "before") + frame + pack("note", "after"))
        ends[2].sendall(pack("note", "well"))
        pump_until(mailbox, lambda: len(heard) == 2)
        assert heard == [(1, "before"), (2, "well")]
        with pytest.raises(PeerLost, match=f"^rank 1 sent .*{reason}") as caught:
            mailbox.require([1, 2])
        assert caught.value.culprit == 1
        mailbox.require([2])

    def test_one_that_is_too_large_is_not_sent(self):
        mailbox, _ends = joined()
        with pytest.raises(ValueError, match=r"'note' has 10000\d\d bytes|'note' has 10\d{5} bytes"):
            mailbox.post(1, "note", b"x" * LARGEST_FRAME)


def test_msgpack_knows_plain_data_only():
    with pytest.raises(TypeError):
        pack("note", object())
    assert msgpack.unpackb(pack("note", (1, 2))[4:]) == ["note", [1, 2]]
