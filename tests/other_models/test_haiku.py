"""A language model of mlp-gpt-jax (Haiku)."""

import haiku as hk
import jax
from mlp_gpt_jax.mlp_gpt_jax import LayerNorm, TransformedMLPGpt, gMLP

import rrfp_jax as rrfp
from tests.other_models.held import Model, Whole, cross_entropy, held, shaken, tokens

OWN = "mlp_gpt/~/"


def gated_perceptrons(dropout):
    """Its only randomness leaves out layers, in evaluation, too: there is no dropout to set."""
    block = {"dim": 16, "dim_ff": 64, "seq_len": 8, "attn_dim": 8}
    model = TransformedMLPGpt(num_tokens=31, dim=16, seq_len=8, depth=2, attn_dim=8)

    def layer(function):
        own = hk.transform(function)

        def apply(params, x, mb):
            rows = mb["tokens"] if x is None else x
            return jax.vmap(lambda row: own.apply(params, mb.key, row))(rows)

        return rrfp.layer(
            apply, init=lambda key, x, mb: own.init(key, mb["tokens"][0] if x is None else x[0])
        )

    def embed(row):
        return hk.Embed(31, 16)(row)

    def run(params, mb):
        return jax.vmap(lambda row: model.apply(params, mb.key, row))(mb["tokens"])

    def parts(params):
        own = {name.removeprefix(OWN): value for name, value in params.items()}
        stems = ["embed", *(f"gmlp{i}" for i in range(2)), ("layer_norm", "linear")]
        return [{k: v for k, v in own.items() if k.startswith(stem)} for stem in stems]

    layers = [
        layer(embed),
        *[layer(lambda x, i=i: x + gMLP(name=f"gmlp{i}", **block)(x)) for i in range(2)],
        layer(lambda x: hk.Linear(31)(LayerNorm()(x))),
    ]
    data = tokens(31, 8)
    example = model.init(jax.random.key(0), jax.numpy.zeros(8, int))
    whole = Whole(params=shaken(example), output=run, parts=parts)
    return Model(whole=whole, layers=layers, data=data, loss=cross_entropy)


test_steps, test_evaluation = held([gated_perceptrons], package="mlp_gpt_jax", framework="Haiku")
