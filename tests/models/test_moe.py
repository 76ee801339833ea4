"""Routed experts at a tiny size, beside a loop over tokens: routing, slots, padding, the term of the loss."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.moe import Block, Experts, RoutedConfig

CFG = RoutedConfig(
    d_model=8,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_size=4,
    d_ff=12,
    vocab_size=30,
    n_experts=4,
    dtype=jnp.float32,
    init_scale=0.4,
    balance=1.0,
)
X = jax.random.normal(jax.random.key(0), (3, 10, 8))
REAL = jnp.arange(10) < jnp.array([10, 7, 0])[:, None]


def by_hand(experts, slots):
    """Token after token; outputs [B, T, D], the term, and choices without a slot."""
    out, term, dropped = np.zeros(X.shape), 0.0, 0
    up, gate, down = (np.asarray(matrix[...]) for matrix in (experts.up, experts.gate, experts.down))
    for b in range(len(X)):
        taken, likely = np.zeros(4), np.zeros(4)
        for t in np.flatnonzero(REAL[b]):
            x = np.asarray(X[b, t])
            p = np.asarray(jax.nn.softmax(x @ experts.router[...]))
            best = np.argsort(-p)[:2]
            for e in best:
                taken[e] += 1
                dropped += taken[e] > slots
                if taken[e] <= slots:
                    hidden = jax.nn.silu(x @ gate[e]) * (x @ up[e])
                    out[b, t] += p[e] / p[best].sum() * (hidden @ down[e])
            likely += p
        tokens = int(REAL[b].sum())
        term += 4 * ((taken / (2 * tokens)) @ (likely / tokens)) * tokens if tokens else 0
    return out, term, dropped


@pytest.mark.parametrize(("capacity", "slots"), [(None, 10), (1.0, 5), (0.5, 3)])
def test_tokens_are_computed_by_the_experts_that_they_choose(capacity, slots):
    experts = Experts(replace(CFG, capacity=capacity), rngs=nnx.Rngs(0))
    assert experts.cfg.slots(10) == slots
    y, balance = experts(X, REAL)
    expected, term, dropped = by_hand(experts, slots)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert balance.term == pytest.approx(term, rel=1e-5)
    assert (balance.dropped, balance.choices) == (dropped, 2 * 17)
    assert (dropped > 0) == (capacity is not None)


@pytest.mark.slow(reason="4 s; test_tokens_are_computed_by_the_experts_that_they_choose has routing")
def test_no_row_depends_on_others_and_none_on_padding():
    experts = Experts(replace(CFG, capacity=0.5), rngs=nnx.Rngs(0))
    y, balance = experts(X, REAL)
    rows = [experts(X[b : b + 1], REAL[b : b + 1]) for b in range(3)]
    np.testing.assert_allclose(y, jnp.concatenate([row for row, _ in rows]), atol=1e-6)
    assert float(balance.term) == pytest.approx(sum(float(own.term) for _, own in rows), rel=1e-6)
    other = experts(jnp.where(REAL[..., None], X, 5.0), REAL)
    np.testing.assert_array_equal(other[0], y)
    assert other[1].term == balance.term
    gradient = jax.grad(lambda x: (experts(x, REAL)[0] ** 2).sum() + experts(x, REAL)[1].term)(X)
    assert jnp.isfinite(gradient).all()
    assert (gradient[~REAL] == 0).all()


@pytest.mark.slow(reason="2 s: a model of its own")
def test_the_term_is_least_where_experts_get_equally_much():
    experts = Experts(CFG, rngs=nnx.Rngs(0))
    experts.router[...] = jnp.tile(jnp.eye(4), (2, 1)) * 20
    real = jnp.ones((1, 8), bool)
    even = jnp.eye(8)[None] + 0.5 * jnp.roll(jnp.eye(8), 1, 1)[None]
    assert experts(even, real)[1].term == pytest.approx(8, rel=1e-2)
    assert experts(jnp.tile(even[:, :1], (1, 8, 1)), real)[1].term == pytest.approx(16, rel=1e-2)


def test_a_block_is_causal_and_counts_tokens_up_to_the_last_label():
    block = Block(replace(CFG, capacity=0.5), rngs=nnx.Rngs(0))
    before, balance = block(X, {})
    after, _ = block(X.at[:, 6].add(1), {})
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    assert balance.choices == 2 * 30
    mask = jnp.zeros((3, 10)).at[0, 4].set(1).at[1, 2].set(1).at[1, 7].set(1)
    assert block(X, {"mask": mask})[1].choices == 2 * (5 + 8 + 0)


def test_gradients_go_to_unique_places():
    block = Block(CFG, rngs=nnx.Rngs(0))
    text = str(jax.make_jaxpr(jax.grad(lambda x: block(x, {})[0].sum()))(X))
    scatters = re.findall(r" scatter(?:-add)?\[.*?\n +\] ", text, re.DOTALL)
    assert len(scatters) >= 2
    assert all("unique_indices=True" in scatter for scatter in scatters)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 5}, "top_k=5: give 1 to n_experts=4"),
        ({"capacity": 0.0}, "capacity=0.0"),
        ({"gated": False}, "gated=False"),
        ({"parallel": True}, "parallel=True"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(CFG, **changes)
