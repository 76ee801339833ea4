"""Fine-tunes published weights with LoRA: the base stays frozen, small adapters are trained and then merged.

Start it with `python fine_tune.py FOLDER`, a LLaMA model as downloaded; without one it makes a tiny model.
With one process per stage: `rrfp launch -n 2 fine_tune.py`. Started again, it resumes for 20 more steps.
"""

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import load_file, save_file

import rrfp_jax as rrfp

RANK, STEPS = 4, 20
PARTS = {
    **{"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    **{"out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    **{"norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
}


class Adapted(nnx.Module):
    """A frozen matrix and its adapter: x W + x A B. B begins with zeros, so training begins with the base."""

    def __init__(self, inputs, outputs, rngs):
        self.base = nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)
        self.a = nnx.Param(jax.random.normal(rngs.params(), (inputs, RANK)) / RANK)
        self.b = nnx.Param(jnp.zeros((RANK, outputs)))

    def __call__(self, x):
        return self.base(x) + x @ self.a[...] @ self.b[...]


class Embed(nnx.Module):
    def __init__(self, cfg, rngs):
        self.tokens = nnx.Embed(cfg["vocab_size"], cfg["hidden_size"], rngs=rngs)

    def __call__(self, carry, mb):
        return self.tokens(mb["tokens"])


class Block(nnx.Module):
    """A block of LLaMA: attention with rotary positions and shared keys, then a gated MLP."""

    def __init__(self, cfg, rngs):
        width, inner, heads = cfg["hidden_size"], cfg["intermediate_size"], cfg["num_attention_heads"]
        self.size, self.theta = width // heads, rope_of(cfg).get("rope_theta", 10_000.0)
        shared = cfg.get("num_key_value_heads", heads) * self.size
        self.query, self.out = Adapted(width, width, rngs), Adapted(width, width, rngs)
        self.key, self.value = Adapted(width, shared, rngs), Adapted(width, shared, rngs)
        self.gate, self.up = Adapted(width, inner, rngs), Adapted(width, inner, rngs)
        self.down = Adapted(inner, width, rngs)
        self.norm = nnx.RMSNorm(width, epsilon=cfg["rms_norm_eps"], rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, epsilon=cfg["rms_norm_eps"], rngs=rngs)

    def __call__(self, x, mb):
        y = self.norm(x)
        query, key, value = (
            own(y).reshape(*y.shape[:2], -1, self.size) for own in (self.query, self.key, self.value)
        )
        attended = jax.nn.dot_product_attention(self.turned(query), self.turned(key), value, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))

    def turned(self, heads):
        half = self.size // 2
        angles = np.outer(np.arange(heads.shape[1]), self.theta ** (-np.arange(half) / half))[:, None]
        first, second = jnp.split(heads, 2, axis=-1)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Head(nnx.Module):
    def __init__(self, cfg, rngs):
        self.norm = nnx.RMSNorm(cfg["hidden_size"], epsilon=cfg["rms_norm_eps"], rngs=rngs)
        self.out = nnx.Linear(cfg["hidden_size"], cfg["vocab_size"], use_bias=False, rngs=rngs)

    def __call__(self, x, mb):
        return self.out(self.norm(x))


def loss(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    return rrfp.Loss(nll.sum(), weight=nll.size)


def data(step, microbatches=4, rows=8):
    """Counting by threes, modulo 32: what the base has not learned."""
    starts = np.random.default_rng(step).integers(0, 32, (microbatches, rows, 1))
    numbers = (starts + 3 * np.arange(17)) % 32
    return [{"tokens": own[:, :-1], "labels": own[:, 1:]} for own in numbers]


def published_name(path, cfg):
    """The published tensor of a parameter, such as "1.query.base.kernel"; None for adapters."""
    layer, part, *_ = path.split(".")
    if layer == "0" or (part == "out" and int(layer) > cfg["num_hidden_layers"]):
        tied = layer == "0" or cfg.get("tie_word_embeddings", False)
        return "model.embed_tokens.weight" if tied else "lm_head.weight"
    if int(layer) > cfg["num_hidden_layers"]:
        return "model.norm.weight"
    adapter = path.endswith((".a", ".b"))
    return None if adapter else f"model.layers.{int(layer) - 1}.{PARTS[part]}.weight"


def rope_of(cfg):
    """The config, with what transformers 5 has in `rope_parameters` at its top, as earlier ones have it."""
    return cfg | (cfg.get("rope_parameters") or {})


def read(folder):
    """The config, and the `init` of a Trainer that reads the tensors."""
    cfg = json.loads((folder / "config.json").read_text())
    if others := [name for name in ("rope_scaling", "attention_bias", "mlp_bias") if cfg.get(name)]:
        raise SystemExit(f"{folder}: this example cannot compute models with {others[0]}")
    if (kind := rope_of(cfg).get("rope_type", rope_of(cfg).get("type", "default"))) != "default":
        raise SystemExit(f"{folder}: this example cannot compute rotary positions of the type {kind}")
    if cfg["model_type"] != "llama":
        raise SystemExit(f"{folder}: this example computes LLaMA models, not {cfg['model_type']}")

    def tensor(path):
        name = published_name(path, cfg)
        matrix = path.endswith(".kernel")  # published as [outputs, inputs]
        return name and rrfp.weights.Tensor(name, np.transpose if matrix else np.asarray)

    return cfg, rrfp.weights.pretrained(folder, tensor)


def pipeline(cfg):
    blocks = rrfp.layer(Block, cfg, repeat=cfg["num_hidden_layers"])
    frozen = ["0.*", "-1.*", "*.base.kernel", "*norm.scale"]  # all but the adapters
    return rrfp.Pipeline([rrfp.layer(Embed, cfg), blocks, rrfp.layer(Head, cfg)], loss, frozen=frozen)


def adapters_of(states):
    """By name, such as "1.query.a"; `states` are what `trainer.params()` gives."""
    parts = [(f"{i}.{part}", own) for i, state in enumerate(states[1:-1], 1) for part, own in state.items()]
    return {f"{name}.{key}": np.asarray(own[key][...]) for name, own in parts if "a" in own for key in "ab"}


def merged(folder, cfg, adapters):
    """The published tensors with the adapters added to their matrices."""
    tensors = {name: own for file in folder.glob("*.safetensors") for name, own in load_file(file).items()}
    for path in (name.removesuffix(".a") for name in adapters if name.endswith(".a")):
        name = published_name(f"{path}.base.kernel", cfg)
        change = adapters[f"{path}.a"] @ adapters[f"{path}.b"]
        tensors[name] = (tensors[name] + change.T).astype(tensors[name].dtype)
    return tensors


def write(folder, cfg, tensors):
    """A model in the published form. Files get their names once complete: several processes may do this."""
    folder.mkdir(exist_ok=True)
    part = folder / f"{os.getpid()}.part"
    save_file({name: np.ascontiguousarray(own) for name, own in tensors.items()}, part, {"format": "pt"})
    part.rename(folder / "model.safetensors")
    part.write_text(json.dumps(cfg, indent=2))
    part.rename(folder / "config.json")


def make(folder):
    """A tiny model in the published form, with random weights."""
    cfg = {"model_type": "llama", "vocab_size": 32, "hidden_size": 64, "intermediate_size": 128}
    cfg |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    random, tensors = np.random.default_rng(0), {}
    shapes = {"query": (64, 64), "key": (32, 64), "value": (32, 64), "out": (64, 64)}
    shapes |= {"gate": (128, 64), "up": (128, 64), "down": (64, 128), "norm": (64,), "mlp_norm": (64,)}
    for layer in range(2):
        for part, shape in shapes.items():
            own = random.normal(0, 0.1, shape) if len(shape) == 2 else np.ones(shape)
            tensors[f"model.layers.{layer}.{PARTS[part]}.weight"] = own.astype(np.float32)
    for name, shape in {"model.embed_tokens": (32, 64), "lm_head": (32, 64)}.items():
        tensors[f"{name}.weight"] = random.normal(0, 0.5, shape).astype(np.float32)
    write(folder, cfg, tensors | {"model.norm.weight": np.ones(64, np.float32)})


def main(folder):
    if not (folder / "config.json").exists():
        make(folder)
    cfg, init = read(folder)
    trainer = rrfp.Trainer(pipeline(cfg), optax.adam(1e-2), data=data, mesh=rrfp.Mesh(pp=2), init=init)
    stages = trainer.start()
    trainer.restore("lora.checkpoints")
    for report in trainer.steps(STEPS):
        if trainer.is_main and report.step % 5 == 4:
            print(report)
    trainer.save("lora.checkpoints")  # the adapters and Adam's state for them
    adapters = adapters_of(trainer.params())
    if trainer.is_main:
        save_file(adapters, "adapters.safetensors")
        write(Path("merged"), cfg, merged(folder, cfg, adapters))
        held = {
            what: sum(getattr(own, f"{what}_bytes") for own in stages) for what in ("weight", "optimizer")
        }
        size = sum(own.nbytes for own in adapters.values())
        print(
            f"weights {held['weight']:,} bytes, {size:,} of them adapters; Adam {held['optimizer']:,} bytes"
        )
        print("adapters.safetensors has the adapters, merged/ the model with them")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tiny-llama"))
