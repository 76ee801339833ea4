"""A vision transformer of equimo (Equinox)."""

import equinox as eqx
import jax
from equimo.models import VisionTransformer
from equimo.utils import pool_sd

import rrfp_jax as rrfp
from tests.other_models.frameworks import equinox_whole
from tests.other_models.held import Model, cross_entropy, held, images


def vision_transformer(dropout):
    def make(key):
        return VisionTransformer(
            *(16, 3, 16, 4, 4, [1, 1]),  # image, channels, width, patch, heads, blocks
            **{"num_classes": 5, "reg_tokens": 1, "pos_drop_rate": dropout, "proj_drop": dropout},
            key=key,
        )

    def entrance(key):
        return eqx.tree_at(lambda m: (m.blocks, m.norm, m.head), make(key), ((), None, None))

    def ends(model):
        return {"norm": model.norm, "head": model.head}

    def classify(m, x, mb):
        x = pool_sd(jax.vmap(m["norm"])(x), num_prefix_tokens=2, pool_type="avg", reduce_include_prefix=False)
        return m["head"](x)

    def rows(function):
        return lambda m, x, mb: jax.vmap(lambda row: function(m, row, mb))(mb["image"] if x is None else x)

    random = {"key": lambda mb: mb.key, "inference": lambda mb: not mb.training}
    whole = equinox_whole(
        make,
        lambda m, mb: rows(lambda m, x, mb: m(x, **{k: v(mb) for k, v in random.items()}))(m, None, mb),
        lambda m: [
            eqx.tree_at(lambda m: (m.blocks, m.norm, m.head), m, ((), None, None)),
            *m.blocks,
            ends(m),
        ],
    )
    layers = [
        rrfp.layer(
            make=entrance, call=rows(lambda m, x, mb: m.features(x, mb.key, inference=not mb.training))
        ),
        *[
            rrfp.layer(
                make=lambda key, i=i: make(key).blocks[i],
                call=rows(lambda m, x, mb: m(x, rope_sincos=None, inference=not mb.training, key=mb.key)),
            )
            for i in range(2)
        ],
        rrfp.layer(make=lambda key: ends(make(key)), call=rows(classify)),
    ]
    return Model(drops=True, whole=whole, layers=layers, data=images((3, 16, 16), 5), loss=cross_entropy)


test_steps, test_evaluation = held([vision_transformer], package="equimo", framework="Equinox")
