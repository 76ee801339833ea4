"""Models of keras-hub (Keras on JAX)."""

import jax
import jax.numpy as jnp
import keras
import keras_hub

import rrfp_jax as rrfp
from tests.other_models.held import Model, Whole, cross_entropy, held, shaken, tokens


def keras_layer(built, call):
    """A built layer or model of Keras; `call(function, carry, mb)` calls it."""

    def apply(params, carry, mb):
        seeds = [jax.random.key_data(mb.key)] * len(built.non_trainable_variables)

        def function(*inputs, **options):
            return built.stateless_call(list(params.values()), seeds, *inputs, **options)[0]

        return call(function, carry, mb)

    def init(key):
        return {f"{i:03}": jnp.asarray(v.value) for i, v in enumerate(built.trainable_variables)}

    return rrfp.layer(apply, init=init)


def words(mb):
    return {"token_ids": mb["tokens"], "padding_mask": jnp.ones_like(mb["tokens"])}


def whole_of(model, built, output):
    """The author's model; `built` are the parts of it that are layers of the pipeline."""
    variables = model.trainable_variables

    def run(params, mb):
        seeds = [jax.random.key_data(mb.key)] * len(model.non_trainable_variables)
        return output(model.stateless_call(params, seeds, words(mb), training=mb.training)[0], params)

    def parts(params):
        place = {id(v): params[i] for i, v in enumerate(variables)}
        return [{f"{i:03}": place[id(v)] for i, v in enumerate(own.trainable_variables)} for own in built]

    params = [v.value for v in variables]
    return Whole(params=shaken(params), output=run, parts=parts)


def gpt2_backbone(dropout):
    model = keras_hub.models.GPT2Backbone(31, 2, 4, 16, 32, dropout=dropout, max_sequence_length=8)
    entrance = keras.Model(model.input["token_ids"], model.get_layer("embeddings_dropout").output)
    built = [entrance, *model.transformer_layers, model.layer_norm, model.token_embedding]

    def block(f, x, mb):
        return f(x, decoder_padding_mask=jnp.ones_like(mb["tokens"]), training=mb.training)

    layers = [
        keras_layer(entrance, lambda f, _, mb: f(mb["tokens"], training=mb.training)),
        *[keras_layer(own, block) for own in model.transformer_layers],
        keras_layer(model.layer_norm, lambda f, x, mb: f(x)),
        keras_layer(model.token_embedding, lambda f, x, mb: f(x, reverse=True)),
    ]
    table = next(i for i, v in enumerate(model.trainable_variables) if v is model.token_embedding.embeddings)
    place = next(
        i for i, v in enumerate(entrance.trainable_variables) if v is model.token_embedding.embeddings
    )
    whole = whole_of(model, built, lambda x, params: x @ params[table].T)
    tied = {f"0.{place:03}": "-1.000"}
    return Model(drops=True, whole=whole, layers=layers, data=tokens(31, 8), loss=cross_entropy, tied=tied)


test_steps, test_evaluation = held([gpt2_backbone], package="keras_hub", framework="Keras")
