"""A model, its loss and its training in plain JAX: one program for a whole step, and nothing of ours in it.

The objective is the sum of all totals over the sum of all weights, of all microbatches and all terms, and is
differentiated as it stands: through the weights, too.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax


class View(Mapping):
    """A microbatch as layers see it; its key is that of the documentation: seed, step, microbatch, layer."""

    def __init__(self, fields, step, microbatch, layer, seed=0):
        self.fields, self.training = fields, True
        self.numbers = (seed, step, microbatch, layer)

    @property
    def key(self):
        seed, *numbers = self.numbers
        key = jax.random.key(seed)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key

    def __getitem__(self, name):
        return self.fields[name]

    def __iter__(self):
        return iter(self.fields)

    def __len__(self):
        return len(self.fields)


def objective(case, params, batch, step):
    """The mean loss of a step's microbatches."""
    total = weight = 0
    for j, fields in enumerate(batch):
        carry, terms = None, []
        for i, (_, apply) in enumerate(case.layers):
            out = apply(params[str(i)], carry, View(fields, step, j, i))
            if isinstance(out, tuple) and len(out) == 2 and hasattr(out[1], "metrics"):
                out, term = out
                terms.append(term)
            carry = out
        terms.append(case.loss(carry, View(fields, step, j, len(case.layers))))
        total += sum(jnp.asarray(term.total) for term in terms)
        weight += sum(jnp.asarray(term.weight) for term in terms)
    return total / weight


def value_and_grad(case, params, step=0):
    """Of the parameters that are trained; a frozen one's gradient is left out, tied ones are one."""
    paths, leaves, structure = flat(params)
    owner = {path: case.tied_to.get(path, path) for path in paths}
    known = dict(zip(paths, leaves, strict=True))
    trained = {p: known[p] for p in paths if owner[p] == p and not case.is_frozen(p)}

    def mean(trained):
        values = {**known, **trained}
        tree = jax.tree.unflatten(structure, [values[owner[p]] for p in paths])
        return objective(case, tree, case.batch, step).astype(widest(leaves))

    return jax.jit(jax.value_and_grad(mean))(trained)


def train(case, params, steps, optimizer):
    """The parameters that are trained, by path, after some steps; the optimizer sees the whole tree."""
    for step in range(steps):
        _, gradient = value_and_grad(case, params, step)
        paths, leaves, structure = flat(params)
        known = dict(zip(paths, leaves, strict=True))
        tree, gradients = (nested({p: d[p] for p in gradient}) for d in (known, gradient))
        if step == 0:
            state = optimizer.init(tree)

        @jax.jit
        def update(gradients, state, tree):
            changes, state = optimizer.update(gradients, state, tree)
            return optax.apply_updates(tree, changes), state

        tree, state = update(gradients, state, tree)
        known.update(zip(gradient, flat(tree)[1], strict=True))
        owner = {path: case.tied_to.get(path, path) for path in paths}
        params = jax.tree.unflatten(structure, [known[owner[p]] for p in paths])
    return dict(zip(flat(params)[0], flat(params)[1], strict=True))


def flat(params):
    """Paths with dots, leaves, structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
    return names, [leaf for _, leaf in found], structure


def nested(leaves):
    """{path: leaf} as nested dicts."""
    tree = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        inner = tree
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return tree


def widest(leaves):
    return jnp.float64 if any(leaf.dtype == jnp.float64 for leaf in leaves) else jnp.float32
