"""Documents of text and images as microbatches: each image once and whole, places right, bad ones told."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import rrfp_jax as rrfp
from models import decoder, vlm
from rrfp_jax.data.contract import Data, load_repeatedly, plan_step
from rrfp_jax.data.documents import empty, fill_row
from rrfp_jax.errors import UsageError

data = rrfp.data
SIZES = {"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_size": 8, "d_ff": 16}
SIZES |= {"dtype": jnp.float32, "init_scale": 0.2}
RANDOM = np.random.default_rng(0)


def picture(rows, columns, size):
    return RANDOM.integers(1, 256, (rows * size, columns * size, 3), np.uint8)


@st.composite
def corpora(draw):
    """Documents of text and images in any order, all good; and what they are made of."""
    merge = draw(st.sampled_from([1, 2]))
    text = st.text("abc", min_size=1, max_size=6)
    image = st.builds(picture, st.integers(1, 2), st.integers(1, 2), st.just(2 * merge))
    document = st.lists(st.one_of(text, image), min_size=1, max_size=5).map(lambda parts: ["ab", *parts])
    documents = draw(st.lists(document, min_size=2, max_size=8))

    class Given:
        names = tuple(f"document {i}" for i in range(len(documents)))

        def read(self, i):
            return documents[i]

    end = draw(st.sampled_from([None, 7]))
    patches = data.Patches(size=2, merge=merge, longest=2 * 2 * merge)
    corpus = data.Corpus(
        source=Given(), tokenizer=data.Bytes(), vocabulary=256, patches=patches, end=end, text_alone=True
    )
    return corpus, documents


def expected(parts, corpus):
    """What a row must hold of a document: (token, image's patches or None) of each place, and its labels."""
    places, merge = [], corpus.patches.merge
    for part in parts:
        if isinstance(part, str):
            places += [(byte, None) for byte in part.encode()]
        else:
            cut = corpus.patches.patches_of(part).reshape(-1, merge**2, 12)
            places += [(0, four) for four in cut]
    places += [] if corpus.end is None else [(corpus.end, None)]
    following = [*places[1:], (0, "nothing")]
    labels = [(token if own is None else 0, own is None) for token, own in following]
    size = len(places) - (places[-1][1] is None)
    return places[:size], labels[:size]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(corpora(), st.booleans(), st.integers(1, 3), st.integers(1, 3))
def test_every_document_is_there_once_and_whole(given, packed, rows, buckets):
    corpus, documents = given
    merged = corpus.patches.merge**2
    fit = data.Fit(buckets=buckets, longest=(96, 96), multiple=(merged, 1))
    train = data.Documents(
        corpus=corpus, lengths=fit, rows=rows, microbatches=2, packed=packed, validation_share=0.3
    )
    held = dataclasses.replace(train, split="validation")
    assert sorted([*train.documents, *held.documents]) == list(range(len(documents)))
    seen = Counter()
    for step in range(held.steps):
        for mb in held.plan(step):
            arrays = held.load(mb, mb.fields)
            for name, spec in mb.fields.items():
                assert (arrays[name].shape, str(arrays[name].dtype)) == (spec.shape, spec.dtype)
            assert mb.weight == arrays["mask"].sum()
            for r, row in enumerate(mb.source[2:]):
                own = held.documents[held.rows_of_split.pieces(row)].tolist() if row >= 0 else []
                check_row({k: v[r] for k, v in arrays.items()}, [documents[d] for d in own], corpus)
                seen.update(own)
    assert seen == Counter(held.documents.tolist())
    assert held.plan(held.steps) == held.plan(0)


def check_row(row, documents, corpus):
    at = patch = 0
    images, merge = [], corpus.patches.merge
    for segment, parts in enumerate(documents, 1):
        places, labels = expected(parts, corpus)
        for place, ((token, four), (label, real)) in enumerate(zip(places, labels, strict=True)):
            assert (row["tokens"][at], row["labels"][at], row["mask"][at]) == (token, label, real)
            if "segments" in row:
                assert (row["segments"][at], row["positions"][at]) == (segment, place)
            merged = row["patch_of_token"][at]
            assert (merged == -1) == (four is None)
            if four is not None:
                own = slice(merged * merge**2, (merged + 1) * merge**2)
                np.testing.assert_array_equal(row["patches"][own], four)
            at += 1
        images += [part for part in parts if not isinstance(part, str)]
    for number, image in enumerate(images, 1):
        own = row["images"] == number
        np.testing.assert_array_equal(row["patches"][own], corpus.patches.patches_of(image))
        np.testing.assert_array_equal(
            row["patch_places"][own], corpus.patches.places(*corpus.patches.grid_of(image))
        )
        patch += own.sum()
    used = row["patch_of_token"][row["patch_of_token"] >= 0]
    assert used.tolist() == list(range(patch // merge**2)), "each once, in order"
    assert not any(row[name][patch:].any() for name in ("patches", "patch_places", "images"))
    assert not any(row[name][at:].any() for name in ("tokens", "labels", "mask"))
    assert (row["patch_of_token"][at:] == -1).all()


def pictures(**changes):
    """Twelve documents of 1 to 4 pictures."""
    examples = [
        {"text": "<image>a picture\n" * (1 + i % 4), "images": [picture(1 + i % 2, 2, 4)] * (1 + i % 4)}
        for i in range(12)
    ]
    corpus = data.Corpus(
        source=data.Examples(examples, images="images"),
        tokenizer=data.Bytes(),
        vocabulary=256,
        patches=data.Patches(size=4, longest=8),
    )
    usual = {"corpus": corpus, "lengths": ((4, 32), (16, 80)), "rows": 2, "microbatches": 4}
    return data.Documents(**{**usual, **changes})


def test_images_stacked_in_one_array_are_taken_as_a_list():
    stacked = np.stack([picture(1, 2, 4), picture(1, 2, 4)])
    first, second, text = data.Examples([{"text": "a", "images": stacked}], images="images").read(0)
    assert np.array_equal([first, second], stacked) and text == "a"


def test_a_step_is_planned_by_its_number_alone_and_loads_the_same_again():
    made = pictures(packed=True, lengths=((16, 80),))
    assert isinstance(made, Data)
    later = plan_step(made, 7)
    assert plan_step(pictures(corpus=made.corpus, packed=True, lengths=((16, 80),)), 7) == later
    for j, mb in enumerate(later):
        load_repeatedly(made, 7, j, mb)


def test_images_are_decoded_only_for_patches(monkeypatch):
    made = pictures()
    mb = made.plan(0)[0]
    monkeypatch.setattr(data.Patches, "patches_of", lambda *args: pytest.fail("decoded"))
    monkeypatch.setattr(data.Patches, "grid_of", lambda *args: pytest.fail("opened"))
    assert made.load(mb, sorted(set(mb.fields) - {"patches"}))["mask"].sum() == mb.weight


def test_sizes_of_microbatches_follow_limits_and_costs():
    shapes = lambda made: [(mb["patches"].shape[:2], mb["tokens"].shape) for mb in made.buckets]  # noqa: E731
    assert shapes(pictures()) == [((2, 4), (2, 32)), ((2, 16), (2, 80))]
    limited = pictures(rows=None, patches=20, tokens=160)
    assert shapes(limited) == [((5, 4), (5, 32)), ((1, 16), (1, 80))]
    costs = data.Costs(patches=data.Polynomial(linear=3.0))
    balanced = pictures(balance=costs, order="longest")
    assert shapes(balanced) == [((6, 4), (6, 32)), ((2, 16), (2, 80))]
    sizes = [mb.fields["patches"].shape[1] for mb in balanced.plan(0)]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < pictures().padding.patches < 1 and 0 < pictures().padding.tokens < 1


def test_documents_longer_than_any_bucket_are_refused_or_skipped():
    short = ((4, 32), (8, 60))
    said = r"3 bad documents: 3 with more patches than the 8 of the longest bucket: example:3, example:7"
    with pytest.raises(UsageError, match=said):
        pictures(lengths=short).plan(0)
    made = pictures()
    made = dataclasses.replace(made, corpus=dataclasses.replace(made.corpus, bad="skip"), lengths=short)
    with pytest.warns(UserWarning, match="3 of 12 documents skipped: 3 with more patches"):
        held = dataclasses.replace(made, split="validation")
        assert sorted([*made.documents, *held.documents]) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    with pytest.warns(UserWarning, match="3 with patches and tokens that no bucket holds both: example:3"):
        assert 11 not in dataclasses.replace(made, lengths=((16, 40), (8, 79))).documents
    with pytest.warns(UserWarning, match="3 with more tokens than the 40 of the longest bucket: example:3"):
        assert 11 not in dataclasses.replace(made, lengths=((16, 40),)).documents


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_no_document_is_in_both_splits_whatever_their_lengths():
    corpus = dataclasses.replace(pictures().corpus, bad="skip")

    def documents(split, longest, share):
        lengths = ((16, longest),)
        return {*pictures(corpus=corpus, lengths=lengths, split=split, validation_share=share).documents}

    for longest in (30, 40, 80):
        assert documents("validation", longest, 0.4) and documents("train", longest, 0.4)
        assert not documents("validation", longest, 0.4) & documents("train", 80, 0.4)
        assert not documents("train", longest, 0.4) & documents("validation", 80, 0.4)
    with pytest.raises(UsageError, match="none of 3 documents of the validation split fits a bucket"):
        documents("validation", 20, 0.25)


@pytest.mark.parametrize("seed", [5, 7, 10])
@pytest.mark.parametrize("lengths", [data.Fit(buckets=2, longest=(40, 120)), ((12, 90), (40, 61))])
def test_packed_rows_that_no_bucket_holds_are_taken_apart(seed, lengths):
    """Buckets are fitted to rows of all documents; those of a split are others, and may be longer."""
    random = np.random.default_rng(seed)
    examples = [
        {"text": "a" * tokens, "images": [np.ones((4, 4 * patches, 3), np.uint8)]}
        for patches, tokens in random.integers(1, (12, 40), (40, 2))
    ]
    corpus = dataclasses.replace(pictures().corpus, source=data.Examples(examples, images="images"))
    corpus = dataclasses.replace(corpus, patches=data.Patches(size=4, longest=64))
    made = pictures(corpus=corpus, lengths=lengths, packed=True, validation_share=0.4)
    for own in (made, dataclasses.replace(made, split="validation")):
        rows = np.concatenate(own._rows_of_bucket)
        assert sorted(rows) == list(range(len(own.rows_of_split.size)))
        assert sorted(own.rows_of_split.order) == list(range(len(own.documents)))
        for bucket, held in zip(own.bucket_lengths, own._rows_of_bucket, strict=True):
            assert (own.rows_of_split.size[held] <= bucket).all()


def test_when_none_fits_the_longest_bucket_that_is_said():
    made = pictures(lengths=data.Fit(buckets=1, longest=(2, 8)))
    made = dataclasses.replace(made, corpus=dataclasses.replace(made.corpus, bad="skip"))
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(UsageError, match="none of 12 documents"):
        _ = made.bucket_lengths


def test_a_model_sees_neither_padding_nor_other_documents():
    """The loss of `models/vlm.py` is that of each document by itself."""
    made = pictures(packed=True, lengths=((24, 120),), rows=2)
    encoder = vlm.EncoderConfig(**SIZES, patch_size=4, positions="rotary")
    text = decoder.DecoderConfig(**SIZES, vocab_size=256, positions="learned", max_length=120)
    both, rngs = vlm.VLMConfig(encoder=encoder, decoder=text), nnx.Rngs(0)
    layers = [vlm.PatchEmbed(encoder, rngs=rngs), vlm.EncoderBlock(encoder, rngs=rngs)]
    layers += [vlm.Project(both, rngs=rngs), vlm.Join(text, rngs=rngs)]
    layers += [decoder.Block(text, rngs=rngs), decoder.Head(text, rngs=rngs)]

    @jax.jit
    def loss(mb):
        carry = None
        for layer in layers:
            carry = layer(carry, mb)
        return (optax.softmax_cross_entropy_with_integer_labels(carry, mb["labels"]) * mb["mask"]).sum()

    mb = made.plan(0)[0]
    together = loss(made.load(mb, mb.fields))
    rows = [made.documents[made.rows_of_split.pieces(row)].tolist() for row in mb.source[2:]]
    assert max(len(own) for own in rows) > 1
    alone = 0.0
    for document in (document for own in rows for document in own):
        fields = empty(mb.fields)
        fill_row({name: array[0] for name, array in fields.items()}, [made.corpus.document(document)])
        alone += loss(fields)
    np.testing.assert_allclose(together, alone, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rows": None}, "give the size of a microbatch"),
        ({"tokens": 4}, "rows=2: give the size"),
        ({"rows": 0}, "rows=0"),
        ({"lengths": ((4, 4), (4, 4))}, "give different pairs"),
        ({"microbatches": 10**9}, "give at most"),
        ({"split": "test"}, "split='test'"),
    ],
)
def test_impossible_settings_are_refused(settings, said):
    with pytest.raises(UsageError, match=said):
        pictures(**settings)


def test_merged_patches_need_multiples():
    corpus = dataclasses.replace(pictures().corpus, patches=data.Patches(size=2, merge=2))
    with pytest.raises(UsageError, match="6 patches: 4 of them are merged to one"):
        pictures(corpus=corpus, lengths=((6, 32),))
    with pytest.raises(UsageError, match="1 patches: 4 of them are merged"):
        pictures(corpus=corpus, lengths=data.Fit(buckets=2, longest=(8, 32)))
