"""Images before text at a tiny size: what reaches what, padding, positions, places of patches."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Block, DecoderConfig, Head
from models.vlm import EncoderBlock, EncoderConfig, Join, PatchEmbed, Project, VLMConfig

ENCODER = EncoderConfig(
    d_model=16,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    head_size=8,
    d_ff=24,
    patch_size=2,
    grid=(3, 4),
    dtype=jnp.float32,
    init_scale=0.2,
)
DECODER = DecoderConfig(
    d_model=20,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_size=10,
    d_ff=24,
    vocab_size=30,
    dtype=jnp.float32,
    init_scale=0.2,
)
CFG = VLMConfig(encoder=ENCODER, decoder=DECODER)


def microbatch(seed=0):
    """Two rows: two images of 2 x 2 and 1 x 4 patches, and one of 2 x 2; 10 patches, 12 tokens a row."""
    draw = np.random.default_rng(seed)
    square = [(r, c) for r in range(2) for c in range(2)]
    places = [[*square, *((0, c) for c in range(4)), (0, 0), (0, 0)], square + [(0, 0)] * 6]
    images = [[1] * 4 + [2] * 4 + [0] * 2, [1] * 4 + [0] * 6]
    of_token = [[-1, 0, 1, 2, 3, -1, -1, 4, 5, 6, 7, -1], [-1, -1, 3, 2, 1, 0, *[-1] * 6]]
    patches = draw.integers(0, 256, (2, 10, 12)) * (np.array(images) > 0)[..., None]
    return {
        "patches": jnp.array(patches, jnp.uint8),
        "patch_places": jnp.array(places, jnp.int32),
        "images": jnp.array(images, jnp.int32),
        "tokens": jnp.array(draw.integers(0, 30, (2, 12)), jnp.int32),
        "patch_of_token": jnp.array(of_token, jnp.int32),
    }


def model(cfg):
    """All layers with parameters."""
    kinds = [
        (PatchEmbed, cfg.encoder),
        *[(EncoderBlock, cfg.encoder)] * 2,
        (Project, cfg),
        (Join, cfg.decoder),
    ]
    kinds += [(Block, cfg.decoder), (Head, cfg.decoder)]
    return [kind(own, rngs=nnx.Rngs(i)) for i, (kind, own) in enumerate(kinds)]


def run(layers, mb):
    carry = None
    for layer in layers:
        carry = layer(carry, mb)
    return carry


def changed(mb, **fields):
    return mb | {name: mb[name].at[at].set(value) for name, (at, value) in fields.items()}


@pytest.mark.slow(reason="4 s: a whole model; test_tokens_take_the_patches_that_they_name has its layer")
@pytest.mark.parametrize(
    "changes",
    [{}, {"positions": "axes"}, {"positions": "rotary"}, {"norm": "rms", "qk_norm": True, "parallel": True}],
    ids=["learned", "axes", "rotary", "parallel"],
)
def test_an_image_reaches_its_own_patches_and_the_text_after_it(changes):
    layers, mb = model(replace(CFG, encoder=replace(ENCODER, **changes))), microbatch()
    other = changed(mb, patches=((0, 5), 7))  # of the second image of the first row
    before, after = (run(layers[:3], fields) for fields in (mb, other))
    np.testing.assert_array_equal(after[0, :4], before[0, :4])
    np.testing.assert_array_equal(after[1], before[1])
    assert (after[0, 4:8] != before[0, 4:8]).any(axis=-1).all()
    before, after = (run(layers, fields) for fields in (mb, other))
    assert (before.shape, before.dtype) == ((2, 12, 30), jnp.float32)
    np.testing.assert_array_equal(after[0, :7], before[0, :7])
    assert (after[0, 7:] != before[0, 7:]).any(axis=-1).all()
    moved = run(layers, changed(mb, patch_places=((0, 5), (2, 3))))
    assert (moved[0, 7:] != before[0, 7:]).any(axis=-1).all()


@pytest.mark.slow(reason="11 s: gradients of a whole model; data/test_image_documents.py has outputs")
def test_padding_reaches_nothing_and_has_no_gradient():
    layers, mb = model(CFG), microbatch()
    graph, state = nnx.split(layers)

    def summed(state, pixels):
        return (run(nnx.merge(graph, state), mb | {"patches": pixels}) ** 2).sum()

    pixels = mb["patches"].astype(jnp.float32)
    gradient, of_pixels = jax.grad(summed, (0, 1))(state, pixels)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert (of_pixels[mb["images"] == 0] == 0).all()
    assert (of_pixels[mb["images"] > 0] != 0).any(axis=-1).all()
    other = jnp.where((mb["images"] == 0)[..., None], 200.0, pixels)
    np.testing.assert_array_equal(summed(state, other), summed(state, pixels))


def test_tokens_take_the_patches_that_they_name():
    layers, mb = model(CFG), microbatch()
    projected = run(layers[:4], mb)
    joined = layers[4](projected, mb)
    at = np.asarray(mb["patch_of_token"])
    words = layers[4].tokens(mb["tokens"])
    for row in range(2):
        for token in range(12):
            expected = projected[row, at[row, token]] if at[row, token] >= 0 else words[row, token]
            np.testing.assert_array_equal(joined[row, token], expected)


def test_the_gradient_of_patches_is_put_to_unique_places():
    layers, mb = model(CFG), microbatch()
    text = str(jax.make_jaxpr(jax.grad(lambda x: layers[4](x, mb).sum()))(jnp.ones((2, 10, 20))))
    (scatter,) = re.findall(r"scatter-add\[.*?\n +\] ", text, re.DOTALL)
    assert "unique_indices=True" in scatter


def test_four_patches_are_one_token():
    cfg = replace(CFG, merge=2)
    project = Project(cfg, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 12, 16))
    merged = project(x, {})
    assert merged.shape == (2, 3, 20)
    other = project(x.at[0, 5].add(1), {})
    np.testing.assert_array_equal(other[0, [0, 2]], merged[0, [0, 2]])
    assert (other[0, 1] != merged[0, 1]).any()
    with pytest.raises(AssertionError, match="not divisible"):
        project(x[:, :10], {})


def test_a_class_token_is_learned_and_its_patch_counts_nothing():
    embed = PatchEmbed(replace(ENCODER, class_token=True), rngs=nnx.Rngs(0))
    mb = changed(microbatch(), patch_places=((0, 4), (-1, -1)))
    x = embed(None, mb)
    np.testing.assert_allclose(x[0, 4], embed.class_token.embedding[0] + embed.places.embedding[0], rtol=1e-6)
    np.testing.assert_array_equal(embed(None, changed(mb, patches=((0, 4), 9))), x)
    plain = embed.pixels((mb["patches"] / 255 - 0.5) / 0.5)
    np.testing.assert_allclose(x[0, 3], plain[0, 3] + embed.places.embedding[1 + 4 + 1], rtol=1e-5)


@pytest.mark.parametrize("positions", ["learned", "axes"])
@pytest.mark.parametrize("place", [(3, 0), (0, 4), (-1, 2), (-1, -1)])
def test_a_place_outside_the_grid_is_not_a_number(positions, place):
    embed = PatchEmbed(replace(ENCODER, positions=positions), rngs=nnx.Rngs(0))
    x = embed(None, changed(microbatch(), patch_places=((0, 5), place)))
    assert jnp.isnan(x[0, 5]).all()
    assert jnp.isfinite(jnp.delete(x[0], 5, axis=0)).all()


def test_rotary_scores_depend_on_the_way_from_place_to_place():
    encoder = replace(ENCODER, positions="rotary")
    block, mb = EncoderBlock(encoder, rngs=nnx.Rngs(0)), microbatch()
    x = jax.random.normal(jax.random.key(0), (2, 10, 16))
    shifted = mb | {"patch_places": mb["patch_places"] + jnp.array([3, 5])}
    np.testing.assert_allclose(block(x, shifted), block(x, mb), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: replace(ENCODER, grid=(0, 4)), "grid=\\(0, 4\\)"),
        (lambda: replace(ENCODER, patch_size=0), "patch_size=0"),
        (lambda: replace(ENCODER, positions="rotary", head_size=6), "head_size=6"),
        (lambda: replace(ENCODER, positions="axes", class_token=True), "class_token=True"),
        (lambda: replace(CFG, merge=3), "merge=3"),
        (lambda: replace(CFG, merge=2, encoder=replace(ENCODER, class_token=True)), "merge=2"),
    ],
)
def test_what_does_not_fit_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    "changes",
    [
        {"patches": np.zeros((2, 10, 13), np.uint8)},
        {"patch_places": np.zeros((2, 9, 2), np.int32)},
        {"images": np.zeros((1, 10), np.int32)},
        {"patch_of_token": np.zeros((2, 1), np.int32)},
    ],
    ids=["patches", "places", "images", "tokens"],
)
def test_what_would_be_broadcast_in_silence_is_refused(changes):
    with pytest.raises(AssertionError, match="shape"):
        run(model(CFG), microbatch() | changes)
