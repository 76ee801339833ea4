"""How far one walks through the package: `python -m tests.house.walks [--only=WORDS] [--list] [--json=FILE]`.

Each walk is traced in a process of its own, with `sys.setprofile` and `threading.setprofile`. It counts files
of the package of which a function was entered, and these functions. What runs while a module is imported does
not count. Functions of one file and name, as all comprehensions of a function, count once; Python 3.12 has
fewer of these. The walks are the table of part 22.

    step     the third `trainer.step` of 2 stages, 4 small layers and 4 microbatches in one process
    run      `rrfp train`, from flags to the end of the first step
    budget   the same run: functions that are given a byte budget, or bytes made of it, or an object with such
             a field, up to the admission of the first step
    death    a rank of two is killed in a step: from then on in the launcher and in the rank that survives
"""

import argparse
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.golden.checkout import variables
from tests.house.figures import ENGINE, room_of

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'rrfp_jax'}{os.sep}"
MAIN, ALL = "main thread", "all threads"
STEPS_BEFORE = 2

BUDGET = 7_777_777_777
NEAR = 2**22
"""Bytes: what is made of the budget differs from it by less, as the model is smaller; nothing else does."""

LIMIT_SECONDS = 300.0


class Walk:
    """Notes the functions of the package that are entered while it is on."""

    def __init__(self, wanted=None, file=None):
        self.on, self.wanted, self.file = False, wanted, file
        self.seen = {MAIN: {}, ALL: {}}

    def listen(self):
        """In this thread, and in those that are begun from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame, event, result):
        if not self.on or event not in (("call",) if self.wanted is None else ("call", "return")):
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or not is_function(code):
            return
        threads = [ALL] + [MAIN] * (threading.current_thread() is threading.main_thread())
        if all(code in self.seen[which] for which in threads):
            return
        if importing(frame):
            return
        if self.wanted is None or self.wanted(frame, result if event == "return" else None):
            for which in threads:
                self.seen[which][code] = None
            if self.file is not None:
                with self.file.open("a") as file:
                    file.write(json.dumps([place(code), threads]) + "\n")

    def plain(self):
        return {which: [place(code) for code in found] for which, found in self.seen.items()}


def is_function(code):
    """Whether code is that of a function, not of a module or a class."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def importing(frame):
    """Whether a function runs because a module of the package is imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def place(code):
    """`rrfp_jax/FILE:LINE NAME` of a function."""
    return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno} {code.co_qualname}"


def is_budget(value, depth=2):
    """Whether a value is the budget, or was made of it, or holds such a value."""
    if isinstance(value, int):
        return abs(value - BUDGET) < NEAR
    if isinstance(value, str):
        return len(value) < 1000 and str(BUDGET) in value
    if depth == 0:
        return False
    if isinstance(value, dict):
        return len(value) < 1000 and any(is_budget(own, depth - 1) for own in list(value.values()))
    if isinstance(value, tuple | list):
        return len(value) < 1000 and any(is_budget(own, depth - 1) for own in list(value))
    fields = getattr(value, "__dict__", None)
    return isinstance(fields, dict) and any(is_budget(own, 0) for own in list(fields.values()))


def has_budget(frame, result):
    """Whether a function is given the budget, makes it or returns it."""
    return is_budget(result) or any(map(is_budget, list(frame.f_locals.values())))


# The walks, each in a process of its own.


def toy_trainer(data):
    """Four small layers on two stages."""
    import jax
    import optax

    import rrfp_jax as rrfp
    from tests.scripts import small_model

    table = rrfp.layer(small_model.embed, init=lambda key: {"table": jax.random.normal(key, (8, 8))})
    blocks = rrfp.layer(block, init=small_model.matrix, repeat=2)
    head = rrfp.layer(small_model.head, init=small_model.matrix)
    pipe = rrfp.Pipeline([table, blocks, head], small_model.loss)
    return rrfp.Trainer(pipe, optax.sgd(0.1), data=data, mesh=rrfp.Mesh(pp=2))


def block(params, carry, mb):
    return carry + carry @ params["weight"]


def two_devices():
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)


def step(folder):
    """The functions of the third step."""
    walk = Walk()
    walk.listen()
    two_devices()
    from tests.scripts.small_model import microbatches

    batch = microbatches(0, 4)
    trainer = toy_trainer(batch)
    for _ in range(STEPS_BEFORE):
        trainer.step(batch)
    walk.on = True
    report = trainer.step(batch)
    walk.on = False
    assert 0 < report.loss < 10
    return walk.plain()


def train(folder, walk, *flags):
    """`rrfp train` of a tiny run, and what a walk notes until its first step has ended."""
    two_devices()
    from rrfp_jax.commands.cli import main
    from tests.support.quickstart import CONFIG, arguments, with_texts

    with_texts(folder)
    config = folder / "config.py"
    original = CONFIG.removeprefix("--config=")
    config.write_text(Path(original).read_text() + STOPPING)
    sys.modules[__name__].walk = walk
    _, *fields = arguments(folder, steps=2, **{"sequence_length": 8})
    walk.listen()
    walk.on = True
    with (folder / "said.txt").open("w") as said, contextlib.redirect_stdout(said):
        status = main(["train", f"--config={config}", *fields, *flags])
    assert status == 0 and not walk.on
    return walk.plain()


STOPPING = """

class Stopping(Quickstart):
    def on_step(self, report):
        import sys
        sys.modules["__main__"].walk.on = False


def get_config():
    return Stopping(
        name="quickstart",
        steps=2,
        mesh=rrfp.Mesh(pp=2),
        model=gpt.GPTConfig(d_model=8, n_heads=1, d_ff=8, n_layers=1),
    )
"""


def run(folder):
    """The functions from the flags of `rrfp train` to the end of its first step."""
    return train(folder, Walk())


def budget(folder):
    """Those of them that have to do with a budget in bytes."""
    return train(folder, Walk(wanted=has_budget), f"--config.activation_budget={BUDGET}")


def death(folder):
    """The functions of the launcher and of the survivor, after the other rank has killed itself."""
    walk = Walk(file=folder / "launcher.jsonl")
    walk.listen()
    from rrfp_jax.commands.cli import main

    os.environ["JAX_PLATFORMS"] = "cpu"
    os.chdir(folder)
    on_from(walk, folder / "died")
    with (
        (folder / "said.txt").open("w") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        status = main(["launch", "-n", "2", __file__, "--rank", str(folder)])
    walk.on = False
    said = (folder / "said.txt").read_text()
    assert status == 1 and "rank 1 (stage 1) was killed by SIGKILL" in said, said
    survivor = [json.loads(line) for line in (folder / "survivor.jsonl").read_text().splitlines()]
    found = walk.plain()
    for where, threads in survivor:
        for which in threads:
            found[which] += [where] * (where not in found[which])
    return found


def rank(folder):
    """One of the two ranks: the second kills itself in the third step, the first notes what it does then."""
    walk = Walk(file=folder / "survivor.jsonl")
    if os.environ["RRFP_RANK"] == "0":
        walk.listen()
        on_from(walk, folder / "died")
    from tests.scripts.small_model import microbatches

    def data(step):
        if step == STEPS_BEFORE and os.environ["RRFP_RANK"] == "1":
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return microbatches(step, 4)

    list(toy_trainer(data).steps(4))


def on_from(walk, mark):
    """Turn a walk on as soon as a file is there."""

    def look():
        while not mark.exists():
            time.sleep(0.001)
        walk.on = True

    threading.Thread(target=look, daemon=True).start()


WALKS = {"step": step, "run": run, "budget": budget, "death": death}


# The command.


def traced(name):
    """A walk in a process of its own: by threads, the functions that were entered."""
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.house.walks", f"--walk={name}", f"--folder={folder}"],
            cwd=ROOT,
            env=variables(ROOT),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((Path(folder) / "walk.json").read_text())


def counts(found):
    """Files and functions of a walk, in all rooms and in the engine's, by threads."""
    table = {}
    for which, places in found.items():
        engine = [one for one in places if room_of(one) in ENGINE]
        for where, own in (("", places), (", engine", engine)):
            named = {(one.partition(":")[0], one.partition(" ")[2]) for one in own}
            table[f"{which}{where}"] = {"files": len({file for file, _ in named}), "functions": len(named)}
    return table


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m tests.house.walks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORDS", help=f"some of {', '.join(WALKS)}")
    parser.add_argument("--list", action="store_true", help="print every function, by file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write counts and functions here")
    parser.add_argument("--walk", choices=WALKS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.walk:
        found = WALKS[options.walk](options.folder)
        (options.folder / "walk.json").write_text(json.dumps(found))
        return 0
    found = {name: traced(name) for name in options.only.split() or WALKS}
    for name, own in found.items():
        for which, count in counts(own).items():
            print(f"{name:8} {which:24} {count['files']:4} files {count['functions']:5} functions")
        if options.list:
            print("\n".join(f"    {one}" for one in sorted(own[ALL])))
    if options.json:
        options.json.write_text(
            json.dumps({name: {**counts(own), "functions": own} for name, own in found.items()})
        )
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))
