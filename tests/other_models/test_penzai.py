"""Language models of penzai."""

import jax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common as common

import rrfp_jax as rrfp
from tests.other_models.held import Model, Whole, cross_entropy, held, shaken, tokens

SIZES = {"num_kv_heads": 2, "query_head_multiplier": 2, "embedding_dim": 16, "projection_dim": 8}
SIZES |= {"mlp_hidden_dim": 32, "num_decoder_blocks": 2, "vocab_size": 31}


def split(model):
    """Parameters by name, and the model without them."""
    unbound, params = pz.unbind_params(model, freeze=True)
    return {param.label: param for param in params}, unbound


def combine(params, unbound):
    return pz.bind_variables(unbound, params.values())


def language_model(config, tied):
    def make(key):
        return common.build_llamalike_transformer(config, init_base_rng=key)

    def words(mb):
        return pz.nx.wrap(mb["tokens"]).tag("batch", "seq")

    def run(params, mb):
        return combine(params, static)(words(mb)).unwrap("batch", "seq", "vocabulary")

    def call(m, x, mb):
        x = m(words(mb) if x is None else x, token_positions=pz.nx.arange("seq", 8))
        return x.unwrap("batch", "seq", "vocabulary") if "vocabulary" in x.named_axes else x

    params, static = split(make(jax.random.key(0)))
    labels = [split(part)[0] for part in make(jax.random.key(0)).body.sublayers]

    def parts(params):
        return [{label: params[label] for label in own} for own in labels]

    layers = [
        rrfp.layer(make=lambda key, i=i: make(key).body.sublayers[i], split=split, combine=combine, call=call)
        for i in range(len(labels))
    ]
    whole = Whole(params=shaken(params), output=run, parts=parts)
    return Model(whole=whole, layers=layers, data=tokens(31, 8), loss=cross_entropy, tied=tied)


def llama(dropout):
    config = common.LlamalikeTransformerConfig(**SIZES, mlp_variant="swiglu", tie_embedder_and_logits=False)
    return language_model(config, {})


def gemma2(dropout):
    kinds = [common.AttentionTypeSlidingWindowCausal(4), common.AttentionTypeGlobalCausal()]
    config = common.LlamalikeTransformerConfig(
        **SIZES,
        **{"mlp_variant": "geglu_approx", "tie_embedder_and_logits": True, "attention_type": kinds},
        **{"use_post_attn_norm": True, "use_post_ffw_norm": True, "attn_logits_soft_cap": 50.0},
    )
    table = "transformer/embedder.embeddings.value.data_array"
    return language_model(config, {f"0.{table}": f"-1.{table}"})


test_steps, test_evaluation = held([llama, gemma2], package="penzai", framework="penzai")
