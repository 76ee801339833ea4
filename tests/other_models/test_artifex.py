"""Models of avitai-artifex (NNX), which keep random streams for dropout."""

import numpy as np
from artifex.generative_models.core.layers import transformers
from artifex.generative_models.models.backbones import dit
from flax import nnx

import rrfp_jax as rrfp
from tests.other_models.frameworks import nnx_whole
from tests.other_models.held import ROWS, Model, cross_entropy, held, squares


def transformer_encoder(dropout):
    width = 16
    rates = {"dropout_rate": dropout, "attention_dropout_rate": dropout}

    def data(random):
        return {
            "x": random.standard_normal((ROWS, 6, width)).astype(np.float32),
            "labels": random.integers(0, width, (ROWS, 6)),
        }

    whole = nnx_whole(
        lambda rngs: transformers.TransformerEncoder(2, width, 4, **rates, rngs=rngs),
        lambda m, mb: m(mb["x"], deterministic=not mb.training),
        lambda m: [m.pos_encoding, *m.layers, m.norm],
    )
    layers = [
        rrfp.layer(
            transformers.SinusoidalPositionalEncoding,
            width,
            max_len=1024,
            dropout_rate=dropout,
            call=lambda m, _, mb: m(mb["x"], deterministic=not mb.training),
        ),
        rrfp.layer(
            transformers.TransformerEncoderBlock,
            width,
            4,
            **rates,
            repeat=2,
            call=lambda m, x, mb: m(x, deterministic=not mb.training),
        ),
        rrfp.layer(nnx.LayerNorm, width, call=lambda m, x, mb: m(x)),
    ]
    return Model(drops=True, whole=whole, layers=layers, data=data, loss=cross_entropy)


def diffusion_transformer(dropout):
    sizes = {"img_size": 8, "patch_size": 2, "hidden_size": 16, "num_heads": 4}

    def data(random):
        image, target = random.standard_normal((2, ROWS, 8, 8, 3)).astype(np.float32)
        return {"image": image, "target": target, "time": random.uniform(0, 100, ROWS).astype(np.float32)}

    def without(*names):
        def make(rngs):
            model = dit.DiffusionTransformer(**sizes, depth=0, rngs=rngs)
            for name in names:
                setattr(model, name, None)
            return model

        return make

    ends = ["patch_embed", "pos_embed", "time_embed"]

    def enter(m, _, mb):
        x = m.patch_embed(mb["image"]).reshape(ROWS, -1, 16) + m.pos_embed[...]
        return {"x": x, "c": m.time_embed(mb["time"])}

    whole = nnx_whole(
        lambda rngs: dit.DiffusionTransformer(**sizes, depth=2, dropout_rate=dropout, rngs=rngs),
        lambda m, mb: m(mb["image"], mb["time"], deterministic=not mb.training),
        lambda m: [
            {name: getattr(m, name) for name in ends},
            *m.blocks,
            {"final_layer": m.final_layer},
        ],
    )
    layers = [
        rrfp.layer(without("final_layer"), call=enter),
        rrfp.layer(
            dit.DiTBlock,
            16,
            4,
            dropout_rate=dropout,
            call=lambda m, s, mb: s | {"x": m(s["x"], s["c"], deterministic=not mb.training)},
            repeat=2,
        ),
        rrfp.layer(without(*ends), call=lambda m, s, mb: m.unpatchify(m.final_layer(s["x"], s["c"]))),
    ]
    return Model(drops=True, whole=whole, layers=layers, data=data, loss=squares)


test_steps, test_evaluation = held(
    [transformer_encoder, diffusion_transformer], package="artifex", framework="NNX"
)
