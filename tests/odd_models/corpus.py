"""Holds composed models against plain JAX on 1, 2 and 4 stages, and counts what came of it.

python -m tests.odd_models.corpus --count=320 --workers=2
"""

import argparse
import collections
import os
import sys
import time
from multiprocessing import get_context
from pathlib import Path

FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
STAGES = (1, 2, 4)
KEPT = Path(__file__).parents[2] / ".pytest_cache" / "jax"


def outcomes(name, stages=STAGES):
    """(stages, outcome, what was said) of each run of a model, by number or name."""
    from tests.odd_models import composed, outside

    if name in outside.REFUSED:
        return [(2, *_refused(*outside.REFUSED[name]))]
    if name in outside.STREAMS:
        return _streams(outside.STREAMS[name](), composed.batch(), stages)
    model = composed.model(name)
    return _trained(model, composed.batch(), stages)


def named_outcomes(name):
    return name, outcomes(name)


def _trained(model, batch, stages):
    import jax

    found, expected = [], None
    for count in stages:
        try:
            trainer = trainer_of(model.pipeline(), batch, count, model.remat)
            trainer.start()
            if expected is None:
                params = jax.device_put(jax.device_get(trainer.stage_params), jax.local_devices()[0])
                expected = model.expected(params, batch)
                evaluated, _ = model.expected(params, batch, training=False)
            trained = evaluated if count == 2 else None
            found.append((count, *_compared(trainer, batch, expected, trained, model.tolerance)))
        except Exception as error:
            found.append((count, *_said(error)))
    return found


def _compared(trainer, batch, expected, evaluated, tolerance):
    """Loss and gradient; on two stages the evaluation before, and a step of SGD after, too."""
    import jax
    import numpy as np

    from tests.odd_models import plain
    from tests.odd_models.odd import close

    def params():
        return dict(zip(*plain.flat(jax.device_get(trainer.stage_params))[:2], strict=True))

    before = params()
    evaluation = None if evaluated is None else trainer.evaluate(batch).loss
    loss, gradient = trainer.value_and_grad(batch)
    gradient = dict(zip(*plain.flat(gradient)[:2], strict=True))
    try:
        close(loss, expected[0], tolerance, "loss")
        for path, own in expected[1].items():
            close(gradient[path], own, tolerance, f"gradient of {path}")
        if evaluated is not None:
            close(evaluation, evaluated, tolerance, "evaluated loss")
            trainer.step(batch)
            for path, own in expected[1].items():
                step = before[path] - params()[path]
                close(step, 0.1 * np.asarray(own), 10 * tolerance, f"step of {path}")
    except AssertionError as error:
        return "wrong numbers", str(error)
    return "equal", ""


def _streams(pipeline, batch, stages):
    """Random streams kept in modules: each number of stages draws what the unpipelined model draws."""
    import jax

    from rrfp_jax.train.reference import PlainStep
    from tests.odd_models import plain
    from tests.odd_models.odd import close

    found, expected = [], None
    for count in stages:
        try:
            trainer = trainer_of(pipeline, batch, count, "none")
            trainer.start()
            if expected is None:
                params = jax.device_put(jax.device_get(trainer.stage_params), jax.local_devices()[0])
                expected = PlainStep(pipeline, params, batch, (0, 0)).value_and_grad()
                evaluation = trainer.evaluate(batch).loss
            loss, gradient = trainer.value_and_grad(batch)
            close(loss, expected[0], 2e-4, "loss")
            close(trainer.evaluate(batch).loss, evaluation, 2e-4, "evaluated loss")
            assert abs(loss - evaluation) > 1e-4 * abs(loss), "nothing is random while training"
            for path, own, other in zip(*plain.flat(gradient)[:2], plain.flat(expected[1])[1], strict=True):
                close(own, other, 2e-4, f"gradient of {path}")
            found.append((count, "equal", ""))
        except AssertionError as error:
            found.append((count, "wrong numbers", str(error)))
        except Exception as error:
            found.append((count, *_said(error)))
    return found


def _refused(pipeline, said):
    from tests.odd_models import composed

    try:
        trainer_of(pipeline(), composed.batch(), 2, "none").start()
    except Exception as error:
        outcome, text = _said(error)
        missing = [words for words in said if words not in text]
        if outcome == "refused" and not missing:
            return "rightly refused", ""
        return "refused for another reason" if outcome == "refused" else outcome, text
    return "wrongly taken", ""


def _said(error):
    import rrfp_jax as rrfp

    kind = "refused" if isinstance(error, rrfp.UsageError) else "crash"
    return kind, f"{type(error).__name__}: {' '.join(str(error).split())}"


def trainer_of(pipeline, batch, stages, remat):
    import optax

    import rrfp_jax as rrfp

    schedule = "bfw" if stages == 4 else "bf"
    mesh = rrfp.Mesh(pp=stages)
    return rrfp.Trainer(pipeline, optax.sgd(0.1), data=list(batch), mesh=mesh, remat=remat, schedule=schedule)


def begin():
    """In a process of the pool."""
    os.environ["XLA_FLAGS"] = FLAGS
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", str(KEPT))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main():
    from tests.odd_models import outside

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=320, help="models drawn at random")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names or numbers")
    given = parser.parse_args()
    names = [*range(given.first, given.first + given.count), *outside.STREAMS, *outside.REFUSED]
    if given.only:
        names = [int(name) if name.isdigit() else name for name in given.only]
    began, counts, models = time.monotonic(), collections.Counter(), 0
    # A Pool: the executor of Python 3.11 stands still when all its processes have done their share.
    with get_context("spawn").Pool(given.workers, begin, maxtasksperchild=40) as pool:
        for name, found in pool.imap_unordered(named_outcomes, names):
            models += 1
            for stages, outcome, text in found:
                counts[outcome] += 1
                if outcome not in ("equal", "rightly refused"):
                    print(f"model {name}, {stages} stages: {outcome}: {text[:300]}", flush=True)
            if models % 20 == 0:
                print(f"{models} of {len(names)} models, {time.monotonic() - began:.0f} s", flush=True)
    runs, seconds = sum(counts.values()), time.monotonic() - began
    print(
        f"{models} models, {runs} runs in {seconds:.0f} s: "
        + ", ".join(f"{n} {k}" for k, n in counts.items())
    )
    sys.exit(counts["equal"] + counts["rightly refused"] < runs)


if __name__ == "__main__":
    main()
