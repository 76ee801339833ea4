"""A vision transformer of vitax (NNX): axes of a mesh in parameters, random streams kept in modules."""

import jax.numpy as jnp
from flax import nnx
from vitax.models.vit import TransformerEncoder, VisionTransformer

import rrfp_jax as rrfp
from tests.other_models.frameworks import nnx_whole
from tests.other_models.held import ROWS, Model, cross_entropy, held, images

ENTRANCE = ["patch_embeddings", "position_embeddings", "cls_token"]


def vision_transformer(dropout):
    def make(rngs, blocks=2):
        return VisionTransformer(5, 3, 16, 4, blocks, 4, 32, 16, dropout, rngs=rngs)

    def entrance(rngs):
        model = make(rngs, blocks=0)
        model.final_norm = model.classifier = None
        return model

    def enter(m, _, mb):
        patches = m.patch_embeddings(mb["image"]).reshape(ROWS, -1, 16)
        x = jnp.concat([jnp.tile(m.cls_token, [ROWS, 1, 1]), patches], axis=1)
        return m.dropout(x + m.position_embeddings)

    whole = nnx_whole(
        make,
        lambda m, mb: m(mb["image"]),
        lambda m: [
            {name: getattr(m, name) for name in ENTRANCE},
            *m.encoder.layers,
            m.final_norm,
            m.classifier,
        ],
    )
    layers = [
        rrfp.layer(entrance, call=enter),
        rrfp.layer(TransformerEncoder, 16, 32, 4, dropout, call=lambda m, x, mb: m(x), repeat=2),
        rrfp.layer(nnx.LayerNorm, 16, call=lambda m, x, mb: m(x)[:, 0]),
        rrfp.layer(nnx.Linear, 16, 5, call=lambda m, x, mb: m(x)),
    ]
    return Model(drops=True, whole=whole, layers=layers, data=images((16, 16, 3), 5), loss=cross_entropy)


test_steps, test_evaluation = held([vision_transformer], package="vitax", framework="NNX")
