"""What people train with: optax, optax.contrib, and transformations that look at more than their leaf."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from tests.odd_models.odd import WIDTH, Odd, dense, enter, held_against_plain_jax, rows, squares

STEPS = 3
ANOTHER_STAGE = ("optimizer", "another stage")


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def by_kind(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", params)


def place_in_the_tree():
    """Rates by the place of a leaf in the whole tree."""

    def update(updates, state, params=None):
        leaves, structure = jax.tree.flatten(updates)
        return jax.tree.unflatten(structure, [leaf * (i + 1) for i, leaf in enumerate(leaves)]), state

    return optax.GradientTransformation(lambda params: (), update)


def number_of_leaves():
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda leaf: leaf / len(jax.tree.leaves(updates)), updates)
    )


def rate_by_depth(decay=0.5):
    """Layer-wise decay of rates, counted from the top."""

    def update(updates, state, params=None):
        top = max(map(int, updates))
        return {
            layer: jax.tree.map(lambda leaf, d=top - int(layer): leaf * decay**d, own)
            for layer, own in updates.items()
        }, state

    return optax.GradientTransformation(lambda params: (), update)


def norms_at_the_start():
    """Updates over the norm that each leaf had at first."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.linalg.norm, params),
        lambda updates, state, params=None: (jax.tree.map(lambda u, n: u / n, updates, state), state),
    )


def norm_of_all_at_the_start():
    return optax.GradientTransformation(
        optax.tree.norm,
        lambda updates, state, params=None: (jax.tree.map(lambda u: u / state, updates), state),
    )


def largest_of_all():
    """Its state follows from all gradients, but no update from its state."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()),
        lambda updates, state, params=None: (updates, optax.tree.norm(updates)),
    )


def frozen_at_first(count=2):
    """What it starts from is kept for ever, and never read from a gradient."""

    def update(updates, state, params):
        start, number = state
        pulled = jax.tree.map(lambda u, p, s: u + 0.1 * (p - s), updates, params, start)
        return pulled, (start, number + 1)

    return optax.GradientTransformation(lambda params: (params, jnp.zeros((), jnp.int32)), update)


def wider_state():
    """A state whose dtype changes with the first step."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.bfloat16), params),
        lambda updates, state, params=None: (updates, jax.tree.map(lambda u, s: u + s, updates, state)),
    )


def then(*parts, rate=0.1):
    return optax.chain(*parts, optax.sgd(rate))


WORKING = {
    "adabelief": lambda: optax.adabelief(0.01),
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(0.01),
    "adam": lambda: optax.adam(0.01),
    "adam, nesterov": lambda: optax.nadam(0.01),
    "adam, bfloat16 moments": lambda: optax.adam(0.01, mu_dtype=jnp.bfloat16),
    "adamax": lambda: optax.adamax(0.01),
    "adamaxw": lambda: optax.adamaxw(0.01),
    "adamw": lambda: optax.adamw(0.01),
    "adamw, masked": lambda: optax.adamw(0.01, mask=is_matrix),
    "adan": lambda: optax.adan(0.01),
    "amsgrad": lambda: optax.amsgrad(0.01),
    "fromage": lambda: optax.fromage(0.01),
    "lamb": lambda: optax.lamb(0.01),
    "lars": lambda: optax.lars(0.01),
    "lars, masked": lambda: optax.lars(0.01, weight_decay_mask=is_matrix, trust_ratio_mask=is_matrix),
    "lion": lambda: optax.lion(0.01),
    "nadamw": lambda: optax.nadamw(0.01),
    "noisy_sgd": lambda: optax.noisy_sgd(0.01, key=1),
    "novograd": lambda: optax.novograd(0.01),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.01),
    "optimistic_adam": lambda: optax.optimistic_adam_v2(0.01),
    "radam": lambda: optax.radam(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01, centered=True, momentum=0.9),
    "rprop": lambda: optax.rprop(0.01),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(0.01),
    "sm3": lambda: optax.sm3(0.01),
    "yogi": lambda: optax.yogi(0.01),
    "muon": lambda: contrib.muon(0.01),
    "ademamix": lambda: contrib.ademamix(0.01),
    "sophia-like schedule free": lambda: contrib.schedule_free_adamw(0.01),
    "schedule free sgd": lambda: contrib.schedule_free_sgd(0.01),
    "acprop": lambda: contrib.acprop(0.01),
    "padam": lambda: then(optax.scale_by_rms()),
    "add_noise": lambda: then(optax.add_noise(0.1, 0.5, 3)),
    "add_noise, typed key": lambda: then(optax.add_noise(0.1, 0.5, jax.random.key(3))),
    "adaptive_grad_clip": lambda: then(optax.adaptive_grad_clip(0.1)),
    "clip": lambda: then(optax.clip(0.01)),
    "clip_by_block_rms": lambda: then(optax.clip_by_block_rms(0.01)),
    "centralize": lambda: then(optax.centralize()),
    "ema": lambda: then(optax.ema(0.9)),
    "trace": lambda: then(optax.trace(0.9)),
    "normalize by leaf": lambda: then(optax.scale_by_param_block_norm()),
    "block rms": lambda: then(optax.scale_by_param_block_rms()),
    "keep_params_nonnegative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "zero_nans": lambda: then(optax.zero_nans()),
    "masked": lambda: optax.chain(optax.masked(optax.clip(0.01), is_matrix), optax.sgd(0.1)),
    "add_decayed_weights": lambda: then(optax.add_decayed_weights(0.1, is_matrix)),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 5)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adafactor(0.01, min_dim_size_to_factor=2), "vector": optax.adam(0.1)}, by_kind
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.adam(0.01), "vector": optax.set_to_zero()}, by_kind
    ),
    "lookahead-like start": frozen_at_first,
    "set_to_zero": optax.set_to_zero,
    "identity": optax.identity,
    "state of another dtype": lambda: then(wider_state()),
    "place in the tree": lambda: then(place_in_the_tree()),
    "number of leaves": lambda: then(number_of_leaves(), rate=1.0),
    "rate by depth": lambda: then(rate_by_depth()),
    "norms of leaves at the start": lambda: then(norms_at_the_start()),
    "second moments and noise": lambda: optax.chain(
        optax.scale_by_adam(), optax.add_noise(0.01, 0.5, 5), optax.scale(-0.01)
    ),
}

REFUSED = {
    "clip_by_global_norm": lambda: then(optax.clip_by_global_norm(1.0)),
    "normalize_by_update_norm": lambda: then(optax.normalize_by_update_norm()),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "per layer of a list": lambda: then(optax.scale_by_trust_ratio(), optax.clip_by_global_norm(0.1)),
    "norm of all at the start": lambda: then(norm_of_all_at_the_start()),
    "largest of all": lambda: then(largest_of_all()),
    "prodigy": lambda: contrib.prodigy(0.1),
    "dadapt": lambda: contrib.dadapt_adamw(0.1),
    "dog": lambda: contrib.dog(0.1),
    "dowg": lambda: contrib.dowg(0.1),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "cocob-like": lambda: then(
        optax.stateless(lambda u, p: jax.tree.map(lambda x: x * optax.tree.norm(p), u))
    ),
}

NOT_AT_ALL = {
    "lbfgs": lambda: optax.lbfgs(0.1),
    "polyak_sgd": optax.polyak_sgd,
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau()),
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
}


def both(key):
    a, b = jax.random.split(key)
    return {"w": jax.random.normal(a, (WIDTH, WIDTH)), "b": 0.1 + jnp.abs(jax.random.normal(b, (WIDTH,)))}


def biased(params, carry, mb):
    return dense(params, carry, mb) + params["b"]


LAYERS = [(both, lambda p, c, mb: enter(p, c, mb) + p["b"]), (both, biased), (both, biased), (both, biased)]


def cases():
    def case(optimizer, **settings):
        return Odd(layers=LAYERS, loss=squares, batch=rows(), optimizer=optimizer(), **settings)

    for name, optimizer in WORKING.items():
        yield name, case(optimizer, steps=STEPS, tolerance=1e-4)
    for name, optimizer in REFUSED.items():
        yield name, case(optimizer, refused=ANOTHER_STAGE)
    for name, optimizer in NOT_AT_ALL.items():
        yield name, case(optimizer, refused=("optimizer: it cannot update", "second names of tied"))


def names_in(row):
    """Of optax, as a cell of the table has them; what is left open by a star, too."""
    return [
        name.removesuffix("*") for name in re.findall(r"`(?:contrib\.)?([A-Za-z_][A-Za-z_0-9]*\*?)`", row)
    ]


def test_the_table_in_the_documentation_is_what_is_tried_here():
    """Whatever it says works is in WORKING; what is refused, in the others."""
    page = (Path(__file__).parents[2] / "docs" / "numbers.md").read_text()
    rows = [row.split("|")[1:3] for row in page.partition("| Optax | |")[2].splitlines() if "|" in row[:1]]
    working, refused = (
        "".join(map(inspect.getsource, tried))
        for tried in (WORKING.values(), [*REFUSED.values(), *NOT_AT_ALL.values()])
    )
    told = {True: [], False: []}
    for names, verdict in rows[1:]:
        told["work" in verdict] += names_in(names)
    assert len(told[True]) > 30 and len(told[False]) > 10, "the table is there"
    assert [name for name in told[True] if f".{name}" not in working] == ["contrib"]
    assert [name for name in told[False] if f".{name}" not in refused and name not in refused] == []


test_like_plain_jax = held_against_plain_jax(cases())
