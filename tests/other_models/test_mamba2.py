"""A state space model of mamba2-jax (NNX)."""

from flax import nnx
from mamba2_jax import Mamba2Block, Mamba2Config, Mamba2ForCausalLM, RMSNorm

import rrfp_jax as rrfp
from tests.other_models.frameworks import nnx_whole
from tests.other_models.held import Model, cross_entropy, held, tokens


def mamba2(dropout):
    config = Mamba2Config(
        vocab_size=31,
        hidden_size=16,
        state_size=8,
        head_dim=8,
        chunk_size=4,
        num_hidden_layers=2,
        tie_word_embeddings=False,
    )
    whole = nnx_whole(
        lambda rngs: Mamba2ForCausalLM(config, rngs=rngs),
        lambda m, mb: m(mb["tokens"])["logits"],
        lambda m: [m.backbone.embedder, *m.backbone.layers, m.backbone.final_norm, m.lm_head],
    )
    layers = [
        rrfp.layer(nnx.Embed, 31, 16, call=lambda m, _, mb: m(mb["tokens"])),
        rrfp.layer(Mamba2Block, config, 0, call=lambda m, x, mb: m(x)[0], repeat=2),
        rrfp.layer(RMSNorm, 16, eps=config.layer_norm_epsilon, call=lambda m, x, mb: m(x)),
        rrfp.layer(nnx.Linear, 16, 31, use_bias=False, call=lambda m, x, mb: m(x)),
    ]
    return Model(whole=whole, layers=layers, data=tokens(31, 8), loss=cross_entropy)


test_steps, test_evaluation = held([mamba2], package="mamba2_jax", framework="NNX")
