"""A rank of stages that share devices, and of whose replicas others are on the other rank; prints losses."""

import rrfp_jax as rrfp
from tests.support import toy


def main():
    mesh = rrfp.Mesh(pp=3, dp=2, share_devices=True)
    trainer = toy.trainer(3, mesh=mesh, data=lambda step: toy.microbatches(8, seed=step))
    losses = [report.loss for report in trainer.steps(2)]
    if trainer.is_main:
        print(f"losses {losses}", flush=True)


if __name__ == "__main__":
    main()
