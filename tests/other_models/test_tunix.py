"""Language models of google-tunix (NNX), whose parameters name the axes of a mesh."""

import jax.numpy as jnp
from tunix.models.gemma3 import model as gemma
from tunix.models.llama3 import model as llama
from tunix.models.qwen3 import model as qwen

import rrfp_jax as rrfp
from tests.other_models.frameworks import nnx_whole
from tests.other_models.held import Model, cross_entropy, held, tokens

WIDE = {"dtype": jnp.float32, "param_dtype": jnp.float32}
SIZES = {"num_layers": 2, "embed_dim": 16, "hidden_dim": 32, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
DATA = tokens(words=31, length=8)


def whole_logits(model, mb):
    return model(mb["tokens"], mb["positions"], None, mb["mask"])[0]


def decode(layer, x, mb):
    return layer(x, mb["positions"], None, mb["mask"])[1]


def llama3(dropout):
    config = llama.ModelConfig(vocab_size=31, rope_theta=10_000, norm_eps=1e-5, **SIZES)
    model = nnx_whole(
        lambda rngs: llama.Llama3(config, rngs=rngs),
        whole_logits,
        lambda m: [m.embedder, *m.layers, m.final_norm, m.lm_head],
    )
    layers = [
        rrfp.layer(llama.Embedder, 31, 16, call=lambda m, _, mb: m.encode(mb["tokens"])),
        rrfp.layer(llama.DecoderLayer, config, call=decode, repeat=2),
        rrfp.layer(llama.RMSNorm, 16, norm_eps=1e-5, call=lambda m, x, mb: m(x)),
        rrfp.layer(llama.Einsum, "BTD,DV->BTV", (16, 31), sharding=(), call=lambda m, x, mb: m(x)),
    ]
    return Model(whole=model, layers=layers, data=DATA, loss=cross_entropy)


def qwen3(dropout, **settings):
    config = qwen.ModelConfig(vocab_size=31, rope_theta=10_000, norm_eps=1e-5, **SIZES, **settings)
    model = nnx_whole(
        lambda rngs: qwen.Qwen3(config, rngs=rngs),
        whole_logits,
        lambda m: [m.embedder, *m.layers, m.final_norm, m.lm_head],
    )
    layers = [
        rrfp.layer(qwen.Embedder, 31, 16, **WIDE, call=lambda m, _, mb: m.encode(mb["tokens"])),
        rrfp.layer(qwen.DecoderLayer, config, call=decode, repeat=2),
        rrfp.layer(qwen.RMSNorm, 16, norm_eps=1e-5, **WIDE, call=lambda m, x, mb: m(x)),
        rrfp.layer(qwen.Einsum, "BTD,DV->BTV", (16, 31), sharding=(), **WIDE, call=lambda m, x, mb: m(x)),
    ]
    return Model(whole=model, layers=layers, data=DATA, loss=cross_entropy)


def qwen3_remat(dropout):
    return qwen3(dropout, remat_config=qwen.RematConfig.DECODER)


def qwen3_experts(dropout):
    return qwen3(dropout, num_experts=4, num_experts_per_tok=2)


def gemma3(dropout):
    config = gemma.ModelConfig(num_embed=31, sliding_window_size=4, param_dtype=jnp.float32, **SIZES)
    model = nnx_whole(
        lambda rngs: gemma.Gemma3(config, rngs=rngs),
        whole_logits,
        lambda m: [m.embedder, *m.layers, m.final_norm, m.embedder],
    )
    kinds = gemma.GEMMA3_ATTENTION_PATTERN
    layers = [
        rrfp.layer(
            gemma.Embedder, 31, 16, param_dtype=jnp.float32, call=lambda m, _, mb: m.encode(mb["tokens"])
        ),
        *[rrfp.layer(gemma.DecoderLayer, config, kinds[i % len(kinds)], call=decode) for i in range(2)],
        rrfp.layer(gemma.RMSNorm, 16, param_dtype=jnp.float32, call=lambda m, x, mb: m(x)),
        rrfp.layer(gemma.Embedder, 31, 16, param_dtype=jnp.float32, call=lambda m, x, mb: m.decode(x)),
    ]
    tied = {"0.input_embedding": "-1.input_embedding"}
    return Model(whole=model, layers=layers, data=DATA, loss=cross_entropy, tied=tied)


test_steps, test_evaluation = held(
    [llama3, qwen3, qwen3_remat, qwen3_experts, gemma3], package="tunix", framework="NNX"
)
