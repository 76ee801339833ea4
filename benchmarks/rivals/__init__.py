"""Other systems beside this one: the same tasks, the same machine, in turns.

PyTorch's pipelining (torch.distributed.pipelining, over gloo) lives in an environment of its own, which `make
rivals` sets up. The files `torch_*.py` run there. There is no JAX: of `rrfp_jax` they use what needs none.
"""
