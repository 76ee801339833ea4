"""A small image encoder before a text decoder: it learns to say which two colours are side by side.

Start it with `python multimodal.py`, or with one process per stage: `rrfp launch -n 4 multimodal.py`.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rrfp_jax as rrfp

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
SIDE, PATCH, WIDTH, LENGTH = 16, 4, 64, 16  # pixels, pixels, channels, characters
PATCHES = (SIDE // PATCH) ** 2


class PatchEmbed(nnx.Module):
    """Images to patches: uint8[B, 16, 16, 3] -> float32[B, 16, 64]."""

    def __init__(self, rngs):
        self.pixels = nnx.Linear(PATCH * PATCH * 3, WIDTH, rngs=rngs)
        self.places = nnx.Embed(PATCHES, WIDTH, rngs=rngs)

    def __call__(self, carry, mb):
        rows = SIDE // PATCH
        patches = mb["image"].reshape(-1, rows, PATCH, rows, PATCH, 3).swapaxes(2, 3)
        pixels = patches.reshape(-1, PATCHES, PATCH * PATCH * 3) / 255 - 0.5
        return self.pixels(pixels) + self.places(jnp.arange(PATCHES))


class Block(nnx.Module):
    """Attention and an MLP, of the encoder or, causal, of the decoder."""

    def __init__(self, causal, rngs):
        self.attend = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 128, rngs=rngs), nnx.Linear(128, WIDTH, rngs=rngs)
        self.norm, self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.causal = causal

    def __call__(self, x, mb):
        length = x.shape[1]
        mask = np.tril(np.ones((1, 1, length, length), bool)) if self.causal else None
        x = x + self.attend(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Join(nnx.Module):
    """Puts the text behind the patches: the carry grows from [B, 16, 64] to [B, 32, 64]."""

    def __init__(self, rngs):
        self.tokens, self.places = nnx.Embed(128, WIDTH, rngs=rngs), nnx.Embed(LENGTH, WIDTH, rngs=rngs)

    def __call__(self, patches, mb):
        text = self.tokens(mb["tokens"]) + self.places(jnp.arange(LENGTH))
        return jnp.concatenate([patches, text], axis=1)


class Head(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 128, rngs=rngs)

    def __call__(self, x, mb):
        return self.out(self.norm(x[:, PATCHES:]))


def loss(logits, mb):
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])
    mask = mb["labels"] > 0  # 0 is padding
    return rrfp.Loss((nll * mask).sum(), weight=mask.sum())


def example(random):
    """A noisy picture with a colour on either side, and its text: "red, blue"."""
    left, right = random.choice(list(COLOURS), 2)
    image = np.empty((SIDE, SIDE, 3))
    image[:, : SIDE // 2], image[:, SIDE // 2 :] = COLOURS[left], COLOURS[right]
    noisy = np.clip(image + random.normal(0, 50, image.shape), 0, 255).astype(np.uint8)
    return noisy, f"{left}, {right}"


def data(step, microbatches=4, rows=16):
    random = np.random.default_rng(step)
    for _ in range(microbatches):
        images, texts = zip(*(example(random) for _ in range(rows)), strict=True)
        codes = np.array([list(f"\n{text}\n".encode().ljust(LENGTH + 1, b"\0")) for text in texts], np.int32)
        yield {"image": np.stack(images), "tokens": codes[:, :-1], "labels": codes[:, 1:]}


layers = [
    *(rrfp.layer(PatchEmbed), rrfp.layer(Block, causal=False, repeat=2)),
    *(rrfp.layer(Join), rrfp.layer(Block, causal=True, repeat=2), rrfp.layer(Head)),
]
pipe = rrfp.Pipeline(layers, loss)  # frozen=["0.*", "1.*", "2.*"] would keep the encoder as it is
trainer = rrfp.Trainer(pipe, optax.adam(3e-3), data=data, mesh=rrfp.Mesh(pp=4), clip_norm=1.0)
for report in trainer.steps(30):
    if trainer.is_main and report.step % 10 == 9:
        print(report)

model = trainer.params(modules=True)  # plain flax from here on
image, truth = example(np.random.default_rng(10**6))
said = "\n"
while len(said) < LENGTH and said.count("\n") < 2:
    tokens = np.array([list(said.encode().ljust(LENGTH, b"\0"))], np.int32)
    carry, mb = None, rrfp.EvaluationBatch({"image": image[None], "tokens": tokens})
    for layer in model:
        carry = layer(carry, mb)
    said += chr(int(carry[0, len(said) - 1].argmax()))
if trainer.is_main:
    print(f"a new picture of {truth!r} is read as {said.strip()!r}")
