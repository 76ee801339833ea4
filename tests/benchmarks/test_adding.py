"""What the comparison of the two ways to add gradients rests on."""

import jax.numpy as jnp

from benchmarks.backward import measure, traffic, virtual_stage
from models.gpt import GPTConfig

HLO = """HloModule jit_step

%fused_add (param_0: f32[4,8], param_1: bf16[4,8]) -> f32[4,8] {
  ROOT %add.1 = f32[4,8]{1,0} add(%param_0, %param_1)
}

ENTRY %main.9 (a: f32[4,8], b: bf16[4,16]) -> (f32[4,8], pred[]) {
  %b = bf16[4,16]{1,0} parameter(1)
  %a = f32[4,8]{1,0} parameter(0), sharding={replicated}
  %product = (bf16[4,8]{1,0}, /*index=1*/s8[64]{0}) custom-call(%b, %b), custom_call_target="gemm"
  %first = bf16[4,8]{1,0} get-tuple-element(%product), index=0
  %sum = f32[4,8]{1,0} fusion(%a, %first), kind=kLoop, calls=%fused_add
  %constant_0 = pred[] constant(false)
  ROOT %tuple = (f32[4,8]{1,0}, pred[]) tuple(%sum, %constant_0)
}
"""


def test_kernels_and_what_they_move():
    product = 2 * 64 + (2 * 32 + 64)  # reads b, writes the gradient and its workspace
    addition = 4 * 32 + 2 * 32 + 4 * 32
    assert traffic(HLO) == (2, product + addition)


def test_both_ways_give_the_same_bits_and_inside_moves_less():
    model = GPTConfig(dtype=jnp.bfloat16, n_layers=6, d_model=16, n_heads=2, d_ff=32, vocab_size=32)
    found = measure(virtual_stage(model, range(3, 5), "none", batch=1, length=16), "weight", rounds=1)
    assert found["sums_that_differ"] == 0
    assert found["bytes"]["inside"] < found["bytes"]["apart"]
