"""StableHLO of all programs that trainers compile, and footprints of their stages, on 1, 2 and 4 stages."""

import contextlib
import hashlib
import re

import jax

import rrfp_jax as rrfp
from tests.golden.small_models import MODELS, spread
from tests.support.toy import made

STAGES = (1, 2, 4)
SCHEDULES = ("bfw", "bf")

NAME = re.compile(r"^module @\S+", re.MULTILINE)
SYMBOL = r'@("[^"]*"|[\w.$-]+)'
FUNCTION = re.compile(rf"^\s*func\.func (?:private |public )?{SYMBOL}", re.MULTILINE)
RESULT = re.compile(r'jax\.(?:result_info|arg_info) = "(?:[^"\\]|\\.)*"(?:, )?')
PLACE = re.compile(r"\s*loc\([^\n]*\)|^#loc.*\n", re.MULTILINE)


def normal(text):
    """A module without what the names of Python functions, and places in files, have put there."""
    text = PLACE.sub("", RESULT.sub("", NAME.sub("module @program", text, count=1)))
    number = {name: f"f{i}" for i, name in enumerate(n for n in FUNCTION.findall(text) if n != "main")}
    return re.sub(SYMBOL, lambda found: f"@{number.get(found[1], found[1])}", text)


@contextlib.contextmanager
def programs_seen():
    """Hashes of the programs that are compiled meanwhile; each once, for who compiles an equal one varies."""
    seen, compile_it = set(), jax.stages.Lowered.compile

    def noting(lowered, *arguments, **named):
        seen.add(hashlib.sha256(normal(lowered.as_text()).encode()).hexdigest()[:16])
        return compile_it(lowered, *arguments, **named)

    jax.stages.Lowered.compile = noting
    try:
        yield seen
    finally:
        jax.stages.Lowered.compile = compile_it


def compiled(model, mesh, **options):
    """Of a trainer that makes a step of whole backwards, and one of halves: programs and footprints."""
    data = model.data
    try:
        trainer = made(model.pipe, model.optimizer, data=data, mesh=mesh, schedule=SCHEDULES[0], **options)
    except rrfp.UsageError as error:  # drawn models may have parameters that would not train
        return {"refused": str(error)}
    with programs_seen() as seen:
        ledgers = {SCHEDULES[0]: trainer.start()}
        trainer.schedule = SCHEDULES[1]
        trainer.steps(1).__next__()
        ledgers[SCHEDULES[1]] = trainer.start()
    stages = {name: [without_times(ledger.plain()) for ledger in own] for name, own in ledgers.items()}
    return {"programs": sorted(seen), "footprints": stages}


def without_times(ledger):
    return {name: value for name, value in ledger.items() if name != "compile_seconds"}


def of_model(make):
    def golden(given):
        found = {}
        for stages in STAGES:
            model = make()
            if stages <= len(model.pipe):
                found[f"{stages} stages"] = compiled(model, rrfp.Mesh(pp=stages))
        return found

    return golden


TABLE = {name: of_model(make) for name, make in MODELS.items()}
TABLE |= {
    "remat": lambda given: compiled(MODELS["gpt"](), rrfp.Mesh(pp=2), remat="full"),
    "equal schedules": lambda given: compiled(MODELS["toy"](), rrfp.Mesh(pp=2), equal_schedules=True),
    "clip, loss scale": lambda given: compiled(
        MODELS["toy"](), rrfp.Mesh(pp=2), clip_norm=0.3, loss_scale="dynamic"
    ),
    "tp": lambda given: compiled(spread(), rrfp.Mesh(pp=2, tp=2)),
    "dp": lambda given: compiled(MODELS["toy"](), rrfp.Mesh(pp=2, dp=2)),
    "dp, state spread": lambda given: compiled(MODELS["toy"](), rrfp.Mesh(pp=2, dp=2, shard_optimizer=True)),
    "chunks in a V": lambda given: compiled(MODELS["toy"](), rrfp.Mesh(pp=2, chunks=2, shape="v")),
}
