"""Models of transformers (Linen)."""

import flax.linen as nn
import jax.numpy as jnp
from transformers import BertConfig, GPT2Config
from transformers.models.bert import modeling_flax_bert as bert
from transformers.models.gpt2 import modeling_flax_gpt2 as gpt2

import rrfp_jax as rrfp
from tests.other_models.frameworks import linen_whole
from tests.other_models.held import Model, cross_entropy, held, tokens


def gpt2_language_model(dropout):
    config = GPT2Config(
        **{"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8},
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    )

    def run(m, mb):
        all_seen = jnp.ones_like(mb["tokens"])
        return m(mb["tokens"], all_seen, mb["positions"], deterministic=not mb.training).logits

    def embed(m, _, mb):
        return m.dropout(m.wte(mb["tokens"]) + m.wpe(mb["positions"]), deterministic=not mb.training)

    def block(m, x, mb):
        return m(x, jnp.ones_like(mb["tokens"]), deterministic=not mb.training)[0]

    def parts(params):
        own = params["transformer"]
        blocks = [own["h"][str(i)] for i in range(2)]
        return [{"wte": own["wte"], "wpe": own["wpe"]}, *blocks, own["ln_f"], own["wte"]]

    data = tokens(31, 8)
    whole = linen_whole(gpt2.FlaxGPT2LMHeadModule(config), data, run, parts)
    layers = [
        rrfp.layer(gpt2.FlaxGPT2Module, config, call=embed),
        rrfp.layer(gpt2.FlaxGPT2Block, config, call=block, repeat=2),
        rrfp.layer(nn.LayerNorm, epsilon=1e-5, call=lambda m, x, mb: m(x)),
        rrfp.layer(nn.Embed, 31, 16, call=lambda m, x, mb: m.attend(x)),
    ]
    tied = {"0.wte.embedding": "-1.embedding"}
    return Model(drops=True, whole=whole, layers=layers, data=data, loss=cross_entropy, tied=tied)


def bert_classifier(dropout):
    config = BertConfig(
        **{"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 32, "max_position_embeddings": 8, "num_labels": 5},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout),
    )

    def data(random):
        fields = tokens(31, 8)(random)
        return fields | {
            "types": fields["tokens"] % 2,
            "seen": fields["tokens"] > 3,
            "labels": fields["labels"][:, 0] % 5,
        }

    def inputs(mb):
        return mb["tokens"], mb["types"], mb["positions"]

    def run(m, mb):
        tokens, types, positions = inputs(mb)
        return m(tokens, mb["seen"], types, positions, None, deterministic=not mb.training).logits

    def classify(m, x, mb):
        return m.classifier(m.dropout(m.bert.pooler(x), deterministic=not mb.training))

    def parts(params):
        own = params["bert"]
        blocks = [own["encoder"]["layer"][str(i)] for i in range(2)]
        return [
            own["embeddings"],
            *blocks,
            {"bert": {"pooler": own["pooler"]}, "classifier": params["classifier"]},
        ]

    whole = linen_whole(bert.FlaxBertForSequenceClassificationModule(config), data, run, parts)
    layers = [
        rrfp.layer(
            bert.FlaxBertEmbeddings,
            config,
            call=lambda m, _, mb: m(*inputs(mb), mb["seen"], deterministic=not mb.training),
        ),
        rrfp.layer(
            bert.FlaxBertLayer,
            config,
            call=lambda m, x, mb: m(x, mb["seen"], None, deterministic=not mb.training)[0],
            repeat=2,
        ),
        rrfp.layer(bert.FlaxBertForSequenceClassificationModule, config, call=classify),
    ]
    return Model(drops=True, whole=whole, layers=layers, data=data, loss=cross_entropy)


test_steps, test_evaluation = held(
    [gpt2_language_model, bert_classifier], package="transformers", framework="Linen"
)
