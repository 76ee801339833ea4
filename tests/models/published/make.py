"""Makes what lies beside this file: tiny models of published families, and what their own code computes.

    pip install torch transformers
    python tests/models/published/make.py

Weights are random, in bfloat16, in the files and under the names that are usual at huggingface.co, since
`save_pretrained` writes them. The figures are computed from them in float32, by the models of `transformers`.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers as hf

FOLDER = Path(__file__).parent
SIZES = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": 19}
VISION = {**SIZES, "num_attention_heads": 2, "image_size": 6, "patch_size": 2}
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]
NEW = 6
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BASE = {"rope_type": "default", "rope_theta": 500_000.0}


def randomized(model):
    """The model with random bfloat16 values, in float32, so large that each of them matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            drawn = torch.randn(value.shape, generator=generator)
            is_norm = "norm" in name and name.endswith("weight")
            value.copy_((1 + 0.2 * drawn if is_norm else 0.3 * drawn).bfloat16().float())
    return model.eval()


def saved(model, name, **how):
    """Into a folder of its own, as its authors would have published it; gives it as it is read from there."""
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    model.bfloat16().save_pretrained(FOLDER / name, **how)
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    return type(model).from_pretrained(FOLDER / name, dtype=torch.float32).eval()


def numbers(values):
    return [float(f"{value:.7g}") for value in values.detach().double().flatten()]


def image():
    """uint8[6, 6, 3], rows first."""
    return np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)


def main():
    tokens, found = torch.tensor(TOKENS), {}
    with torch.no_grad():
        llama = randomized(hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, rope_parameters=BASE)))
        llama = saved(llama, "llama3", max_shard_size="5KB")
        found["llama3"] = numbers(llama(tokens).logits)
        stretched = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, rope_parameters=BASE | LLAMA_3_1)).eval()
        stretched.load_state_dict(llama.state_dict())
        found["llama3.1"] = numbers(stretched(tokens).logits)
        config = hf.Qwen3Config(**DECODER, head_dim=6, tie_word_embeddings=True, rope_theta=1e6)
        qwen = saved(randomized(hf.Qwen3ForCausalLM(config)), "qwen3")
        found["qwen3"] = numbers(qwen(tokens).logits)
        completed = qwen.generate(tokens, max_new_tokens=NEW, do_sample=False, use_cache=False)
        found["qwen3.greedy"] = completed[:, tokens.shape[1] :].tolist()
        experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "rope_parameters": BASE}
        mixtral = randomized(hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, **experts)))
        found["mixtral"] = numbers(saved(mixtral, "mixtral")(tokens).logits)
        pixels = torch.tensor(image()).permute(2, 0, 1)[None] / 255 * 2 - 1
        vit = randomized(hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3)))
        found["vit"] = numbers(saved(vit, "vit")(pixels).logits)
        text = {**SIZES, "num_hidden_layers": 1, "vocab_size": 3, "max_position_embeddings": 2}
        text |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "intermediate_size": 2}
        siglip = randomized(hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=VISION)))
        siglip = saved(siglip, "siglip")
        found["siglip"] = numbers(siglip.vision_model(pixels).last_hidden_state)
    made_with = {"torch": torch.__version__, "transformers": hf.__version__}
    content = {"made_with": made_with, "tokens": TOKENS, "image": image().flatten().tolist(), **found}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    (FOLDER / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
