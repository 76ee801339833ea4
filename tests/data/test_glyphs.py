"""Characters with their names: split by character, and which letters of a name a picture could tell."""

import dataclasses

import numpy as np
import pytest

from benchmarks.glyphs import edits, fields_of
from configs.glyphs import get_config


@pytest.fixture(scope="module")
def config():
    return get_config()


def test_every_character_is_in_one_document(config):
    glyphs = config.train_data().documents.corpus.source
    codes = [code for name in glyphs.names for code in name.split()]
    assert len(codes) == len(set(codes)) > 5000
    assert {len(name.split()) for name in glyphs.names[:-1]} == {1, 2, 3, 4}
    picture, name = glyphs.read(0)
    assert picture.shape[0] == 32 and picture.shape[1] in (16, 32, 48) and picture.any()
    assert name.endswith("\n")


def names_of(documents):
    return [name for d in documents.documents.tolist() for name in documents.corpus.source.read(d)[1::2]]


def test_open_characters_are_those_that_training_does_not_tell(config):
    train, held = config.train_data(), config.validation_data()
    known = names_of(train.documents)
    assert not set(train.documents.documents) & set(held.documents.documents)
    seen = 0
    for mb in held.plan(0):
        arrays = held.load(mb, ["open", "labels", "mask"])
        assert not (arrays["open"] * (1 - arrays["mask"])).any()
        real = arrays["mask"][0] > 0
        name, *_ = bytes(arrays["labels"][0, real].astype(np.uint8)).decode().splitlines(keepends=True)
        for at, mark in enumerate(arrays["open"][0, real][: len(name)].tolist()):
            following = {other[at] for other in known if other.startswith(name[:at])}
            assert mark == (len(following) != 1)
            seen += mark
    assert seen >= 8


def test_microbatches_differ_by_four_times_in_their_images(config):
    train = config.train_data()
    counts = [
        train.load(mb, ["images"])["images"].max(axis=1).sum() for s in range(12) for mb in train.plan(s)
    ]
    assert max(counts) >= 4 * min(counts)


def test_blank_pictures_change_nothing_else(config):
    blank = dataclasses.replace(config, blank=True)
    one, other = (made.train_data() for made in (config, blank))
    assert one.plan(3) == other.plan(3)
    mb = one.plan(3)[0]
    shown, hidden = (made.load(mb, mb.fields) for made in (one, other))
    assert shown["patches"].any() and not hidden["patches"].any()
    assert all(np.array_equal(shown[name], hidden[name]) for name in mb.fields if name != "patches")


def test_pictures_to_be_read_have_room_for_a_name(config):
    documents = config.validation_data().documents
    pictures = [part for d in range(3) for part in documents.corpus.source.read(d)[::2]]
    fields = fields_of(documents.corpus.patches, pictures)
    places = (fields["patch_of_token"] >= 0).sum(axis=1)
    assert ((fields["images"] > 0).sum(axis=1) == 4 * places).all() and fields["patches"].any(
        axis=(1, 2)
    ).all()
    assert fields["tokens"].shape == (len(pictures), places.max() + 80)


@pytest.mark.parametrize(
    ("one", "other", "least"),
    [("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("abcd", "acd", 1), ("ab", "ba", 2)],
)
def test_edits(one, other, least):
    assert edits(one, other) == edits(other, one) == least
