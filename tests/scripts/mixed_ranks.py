"""One rank of four that train on mixed buckets: parity, and what is compiled. Writes mixed-<rank>.json."""

import json
import sys
from pathlib import Path

import rrfp_jax as rrfp
from tests.support import toy, unpadded
from tests.support.programs import compilations


def main(folder: Path) -> None:
    data = unpadded.documents()
    pipe, mesh = rrfp.Pipeline(unpadded.layers(), toy.loss), rrfp.Mesh(pp=4)
    trainer = toy.trainer(pipe=pipe, data=data, mesh=mesh, clip_norm=0.3)
    rank = trainer._world.rank
    found, expected = {}, None
    for schedule in ("bf", "bfw"):
        trainer.schedule = schedule
        *errors, expected = unpadded.differences(trainer, unpadded.run, data, expected)
        found[schedule] = errors
    (folder / f"mixed-{rank}.json").write_text(json.dumps({"errors": found} | steps(data)))


def steps(data):
    """What a run compiles once it has started, and the orders that its ranks followed."""
    held = unpadded.documents(split="validation", validation_share=0.3, lengths=(5, 8))
    planned = rrfp.schedules.Planned(base=rrfp.schedules.BFW(), evaluations=20)
    pipe, mesh = rrfp.Pipeline(unpadded.layers(), toy.loss), rrfp.Mesh(pp=4)
    trainer = toy.trainer(pipe=pipe, data=data, mesh=mesh, clip_norm=0.3, schedule=planned)
    trainer.start(held)
    reports, evaluated = [], []
    with compilations() as compiled:
        for report in trainer.steps(4):
            reports.append(report)
            evaluated.append(trainer.evaluate(held).loss)
    return {
        "compiled": len(compiled),
        "buckets": len({record.bucket for report in reports for record in report.trace.records}),
        "losses": [report.loss for report in reports] + evaluated,
        "planned": [report.planning_seconds is not None for report in reports],
        "predicted": [report.predicted_seconds for report in reports],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
