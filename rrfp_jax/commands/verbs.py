"""The commands of `rrfp`, one table: what each says of itself, and its flags.

The parser, `--help`, the completion of shells and the checks of the documentation read it. Choices are
written out, so that help imports nothing that takes time; `tests/commands/test_verbs.py` holds them against
what they name.
"""

from __future__ import annotations

from pathlib import Path

from rrfp_jax.commands.flags import Flag, Verb, folder_of, grouped, number
from rrfp_jax.fields import output_of, path_of

MEMORY_SHARE = 0.75
"""Part of a GPU's memory that JAX takes unless XLA_CLIENT_MEM_FRACTION says otherwise."""

STATUS = "exit status: 0 done, 1 failed, 2 invalid arguments, 130 interrupted"

FIGURES = Flag("--json", "FILE.json", "write all numbers here", output_of)
SHARE = number(float, "a share", above=0, most=1)
RESTARTS = number(int, "a number of restarts", 0, most=10**9)
SECONDS = number(float, "a number of seconds", above=0)
CHECKPOINT = number(int, "the step of a checkpoint", 0)
LAYER = number(int, "the number of a layer", 0)
GROUP = number(int, "the ranks of a tensor-parallel group", 1)
PROCESSES = number(int, "a number of processes", 1, most=4096)
"""On one machine: each takes a gigabyte or so."""

TRAIN = Verb(
    name="train",
    line="train the run of a config file, in this process or this rank",
    text="""\
Trains the run that FILE.py's get_config() describes and keeps its files in runs/<name>/.
With --config=FILE.py --help, lists the fields of that run: their values, and what they are for. That takes
some seconds, as the file is read and imports JAX. Modules next to the file can be imported from it.""",
    notes=f"""\
Ctrl-C stops the run after a step; it saves itself if checkpoints are on, and prints how to resume. A second
one ends it at once.

{STATUS}""",
    config=True,
)

LAUNCH = Verb(
    name="launch",
    line="the same, or a script of yours, in several processes on this machine",
    text="""\
Runs a Python script in N processes on this machine. Its rrfp.Trainer joins them into one run, each process
training the pipeline stages of its rank. What they print appears with the rank before each line; it is also
kept in <directory>/<name>/rank-<r>.log.

With --config=FILE.py instead of a script it trains the run that FILE.py's get_config() describes, in as many
processes as its mesh asks for, or N. --config.FIELD=VALUE changes a field, such as its name and directory;
--config=FILE.py --help lists all fields. Modules next to FILE.py can be imported from it.""",
    usage="""\
rrfp launch -n N [--name NAME] [--directory DIR] [--max-restarts N] (SCRIPT.py | -m MODULE) [ARGUMENT ...]
       rrfp launch --config=FILE.py [--config.FIELD=VALUE ...] [-n N]
                   [--max-restarts N [--replace-after SECONDS]]""",
    notes=f"""\
If a rank ends badly the others are ended too, and one diagnosis says which and why (also in diagnosis.txt).
Signals are passed on to all ranks, SIGHUP as SIGTERM; a second Ctrl-C or SIGTERM kills them. No process is
left behind.
RRFP_SILENCE_SECONDS (25) is how long a rank may be silent, as when it is frozen, before it is given up;
RRFP_SAVE_SECONDS (120) how long ranks may take to save after SIGTERM or Ctrl-C.

With --max-restarts a failed run is started again, and must resume from what it saved. It
is given up after three restarts in a row that came no further. With --replace-after as well, a named run of
several replicas continues from the machine's memory and loses no step.

{STATUS}

examples:
  rrfp launch -n 4 train.py --steps=100
  rrfp launch --config=my_run.py --config.steps=100
  rrfp launch -n 2 --name=trial -m mylib.train""",
    flags=(
        Flag("-n", "N", "processes (of a config: what its mesh asks for)", PROCESSES),
        Flag("--name", "NAME", "of a script's run (default: the script's name)"),
        Flag("--directory", "DIR", "where runs of scripts are kept (default: runs)", path_of),
        Flag("--max-restarts", "N", "how often a failed run is started again", RESTARTS, 0),
        Flag(
            "--replace-after",
            "SECONDS",
            "with --config: continue without lost replicas, from memory, and replace them after this long",
            number(int, "a number of seconds", 0, most=10**9),
        ),
    ),
    config=True,
    script=True,
    at_once=True,
)

FAMILIES = "constant log-normal length-imbalanced multimodal slow-link straggler"
SCHEDULE_NAMES = """
bf bfw fb b-priority f-priority gpipe 1f1b interleaved-1f1b zb-h1 zb-h2 zb-v v-half v-min v-zb dualpipe-v"""

STEP = grouped(
    "the step",
    Flag(
        "--workload",
        "FILE.json|RUN",
        "seconds of every task and transfer; or what a run left: RUN, RUN/costs.json",
        path_of,
    ),
    Flag("--family", "NAME", "or steps drawn at random", choices=FAMILIES.split()),
    Flag("--stages", "N", "of a family's steps (default: 8)", number(int)),
    Flag("--microbatches", "N", "of a family, or with a costs.json (default: 32)", number(int)),
    Flag("--seeds", "N", "steps to draw, or the latest of a run", number(int), 1),
    Flag("--jitter", "J", "injected delays", default="J0", choices=["J0", "J1", "J2", "J3"]),
)
RULES = grouped(
    "the schedules",
    Flag(
        "--schedule",
        "NAME",
        "give it again for each (default: 1f1b and bf); ranked:ORDER, auto, planned, csv:FILE, or",
        choices=SCHEDULE_NAMES.split(),
        open_ended=True,
        many=True,
    ),
    Flag(
        "--limit",
        "N",
        "most microbatches in flight on a stage (under ranked: N times its chunks, in chunks of any); "
        "fixed orders hold what they hold; 0 for none (default: as in training)",
        number(int),
    ),
    Flag("--byte-limit", "N", "most bytes in flight on a stage", number(int)),
    Flag("--chunks", "N", "virtual stages of one, where a schedule takes several", number(int), 1),
)
OUTPUTS = grouped(
    "besides the table",
    Flag("--out", "FILE.json", "step time, order and metrics; of several schedules, by name", output_of),
    Flag("--trace", "FILE.json", "for ui.perfetto.dev", output_of),
    Flag("--plot", "FILE", "a picture: .svg, .html, .png or .pdf", output_of),
)

SIM = Verb(
    name="sim",
    line="compare schedules on a workload, in virtual time",
    text="""\
Simulates one step of pipeline-parallel training under one or several schedules, with the scheduling core that
also runs the training, and prints what each of them takes.""",
    notes=f"""\
columns: stall = idle with nothing ready; blocked = a fixed order ignored what was ready; held = a limit or
the order of accumulation held it back; launch, of a run's steps = it waited for the host or its group, or an
estimate was wrong; in flight and MiB = most on any stage; above bound = beyond what no order with as many
chunks can beat, injected delays apart. Over the seeds: medians of times and ratios, means of idle shares,
maxima of what is in flight.

A microbatch is in flight while a stage holds any chunk of it: zb-v, whose stages have two chunks, may show 16
and hold the memory of 8. MiB counts the chunks.

rrfp.simulate() takes more: kinds of links, orders of accumulation, how long a planner may search.

{STATUS}

examples:
  rrfp sim --family=log-normal --schedule=1f1b --schedule=bf --schedule=planned --seeds=20
  rrfp sim --workload=runs/quickstart --schedule=bf --schedule=bfw
  rrfp sim --workload=W.json --schedule=zb-h1 --limit=8 --out=result.json --plot=picture.svg""",
    flags=STEP + RULES + OUTPUTS,
)

CARDS = ["a100-40", "a100-80", "h100", "h100-pcie", "h200", "b200", "l40s"]
DEVICES = [*CARDS, "cpu", "measured"]
LINKS = "nvlink3 nvlink4 nvlink5 pcie4 pcie5 hdr ndr ethernet100 loopback"

PLAN = Verb(
    name="plan",
    line="predict a run's step time, idle time and memory, from its config alone",
    text="""\
Predicts a run's step from its config alone: parameters, bytes and FLOPs of every stage, step time, idle time
and memory on a given device, and the split of the layers that its costs suggest. Nothing is allocated,
compiled or loaded: shapes are abstract, costs are XLA's analysis of every distinct layer, the step is
simulated.""",
    notes="""\
--config.FIELD=VALUE may be given as for rrfp train (--config=FILE --help lists them), such as
--config.schedule=1f1b, --config.remat=full, --config.split=auto.

columns: GFLOP = forward and backward of a microbatch; fixed = weights, optimizer state, gradient
accumulators, parked gradients and, unless config.transport is socket, slots for messages; held = per
microbatch in flight; peak = the most on the device in the simulated order

exit status: 0 done, whether or not the run fits; 1 failed, 2 invalid arguments, 130 interrupted""",
    usage="rrfp plan --config=FILE.py [--card=NAME] [--link=NAME] [--config.FIELD=VALUE ...]",
    flags=(
        Flag(
            "--card", "NAME", "every stage's device (this machine's; measured: by two rates)", choices=DEVICES
        ),
        Flag(
            "--link",
            "NAME",
            "between neighbours (as the device usually has it), or BYTES_PER_SECOND,SECONDS",
            choices=LINKS.split(),
            open_ended=True,
        ),
        Flag("--efficiency", "X", "share of the device's peaks reached", SHARE, 1.0),
        Flag(
            "--memory-share", "X", f"part of memory that JAX takes ({MEMORY_SHARE}; measured: as told)", SHARE
        ),
        FIGURES,
    ),
    config=True,
)

COMPILE = Verb(
    name="compile",
    line="compile a run's programs for GPUs that are not there",
    text="""\
Compiles all programs of a run for GPUs that are not there: every stage, every shape of microbatch. Says per
stage what XLA's compiler wants in bytes, next to what rrfp plan predicts, and whether the run fits. The
programs are kept where the run looks for them, so that a start on such GPUs finds them there.

It needs XLA's compiler for GPUs (pip install 'jax[cuda12]'), but neither a GPU nor a driver. Nothing is
allocated. Without a GPU XLA cannot try out which kernel is fastest: it goes by its own estimates.""",
    notes="""\
--config.FIELD=VALUE may be given as for rrfp train (--config=FILE --help lists them). XLA_FLAGS must be those
of the run; flags for CPUs do not matter. Elsewhere the programs are taken only with this user's key
(docs/security.md).

columns: fixed = weights, optimizer state, gradient accumulators and parked gradients; held = per microbatch
in flight; temporaries = of the largest program of each kind; of two numbers the first is what rrfp plan
predicts, the second what XLA says

exit status: 0 done and it fits, 1 it does not fit or failed, 2 invalid arguments, 130 interrupted""",
    usage="rrfp compile --config=FILE.py --card=NAME [--stages=N,...] [--config.FIELD=VALUE ...]",
    flags=(
        Flag("--card", "NAME", "every stage's device", choices=CARDS, needed=True),
        Flag("--processes", "N", "that the run will have (one for each device)", number(int, above=0)),
        Flag("--stages", "N,...", "compile only these (all)"),
        Flag("--out", "FOLDER", "for programs (where the run looks)", folder_of),
        Flag("--memory-share", "X", "part of the card's memory that JAX takes", SHARE, MEMORY_SHARE),
        Flag("--hlo", "FOLDER", "write every program's HLO here, as text", folder_of),
        FIGURES,
    ),
    config=True,
)

DOCTOR = Verb(
    name="doctor",
    line="check the place where a run would be, before it is started",
    text="""\
Checks, before a run is started, the place where it would be: start it as you would start the run, alone, by
srun, or with RRFP_COORDINATOR, RRFP_PROCESSES and RRFP_RANK. Several tasks call each other. Rank 0 prints
every check, the others what is wrong with them.""",
    notes="""\
exit status: 0 nothing fails, 1 something does, 2 invalid arguments, 130 interrupted

examples:
  rrfp doctor
  srun --ntasks=8 --nodes=2 --gpus-per-task=1 rrfp doctor --tp=2""",
    flags=(
        Flag("--tp", "N", "ranks in a tensor-parallel group", GROUP, 1),
        Flag("--directory", "DIR", "where runs are kept", path_of, default=Path("runs")),
        Flag("--limit", "SECONDS", "for all tasks to call", SECONDS, 60.0),
        Flag("--json", "FILE.json", "the findings of rank 0; of rank 2: FILE.json.2", output_of),
    ),
)

PUBLISHED = "llama3 qwen3 mixtral vit siglip"

EXPORT = Verb(
    name="export",
    line="write a run's parameters as safetensors files",
    text="""\
Writes the parameters of a run's latest intact checkpoint as safetensors files: under the names that they have
here, or, with --as, as models of a published family are, with config.json, so that other programs read them
and rrfp_jax.weights.published does. Values are bitwise those of the checkpoint, unless --dtype is given.

The folder is written under another name and then renamed, so it is complete or absent. It is never
written over. The run may still train. A file at a time is in memory.""",
    notes=f"""\
A tokenizer is not written: copy its files from the model that the run began with. tie_word_embeddings is true
where embedding and head are bitwise identical.

{STATUS}

examples:
  rrfp export runs/quickstart --to=quickstart-weights
  rrfp export runs/tuned --to=tuned --as=qwen3 --dtype=bfloat16
  rrfp export runs/seeing --to=encoder --as=siglip --model=model.encoder --first=0""",
    flags=(
        Flag("RUN", "RUN", "the run's folder, that of its checkpoints, or one of them", path_of, needed=True),
        Flag("--to", "FOLDER", "a new folder", folder_of, needed=True),
        Flag("--as", "FAMILY", "whose names and config.json are written", choices=PUBLISHED.split()),
        Flag("--step", "N", "of another checkpoint than the latest", CHECKPOINT),
        Flag("--dtype", "DTYPE", "of floats (as stored)", choices=["float32", "bfloat16", "float16"]),
        Flag(
            "--model", "NAME", "the object with the sizes of the layers, in the run's config", default="model"
        ),
        Flag("--first", "N", "only a part of the model is of the family; its first layer", LAYER),
        Flag("--shard-gb", "GB", "10^9 bytes of a file at most", number(float, "a size", above=0), 5.0),
        Flag("--replace", "", "rename what is at FOLDER to FOLDER.1, or the next free number"),
    ),
    at_once=True,
)

REPORT = Verb(
    name="report",
    line="say why the steps of a run took as long as they did",
    text="""\
Says why the latest steps of a run took as long as they did: the cause that matters most, where all of the
time went, and what changes would save. The scheduling core runs the steps again for that, at their costs.
Of two runs it says the same side by side, and what differs in their configs.""",
    notes="""\
A run keeps its latest 20 steps in RUN/steps.msgpack. The replay of the steps as they were says how far the
simulator is off; above 5 % it predicts nothing.

exit status: 0 done, 2 invalid arguments

examples:
  rrfp report runs/quickstart
  rrfp report runs/quickstart runs/other
  rrfp report runs/quickstart/steps.msgpack --out=why.html""",
    flags=(
        Flag("RUN", "RUN", "the run's folder, or its steps.msgpack", path_of, needed=True),
        Flag("RUN2", "RUN2", "another one, to be compared with it", path_of),
        Flag("--out", "FILE.html", "where the page of one run goes (RUN/report.html)", output_of),
    ),
)

TOP = Verb(
    name="top",
    line="show a run in a terminal while it trains",
    text="""\
Shows a run in a terminal while it trains: step and loss, the slowest rank, every stage as a bar of what it
does with a step (computing, and why it is idle), its memory, and how long messages take.""",
    notes="""\
It reads the files in the run's folder, so it works over ssh, and wherever that folder can be read. It waits
for a run that has not begun. It ends when the run has ended, or by Ctrl-C. If not all stages fit the
terminal, those that are busy longest are shown.

exit status: 0 done, 2 invalid arguments

examples:
  rrfp top runs/quickstart
  rrfp top runs/quickstart --every=5
  rrfp top runs/quickstart --once > frame.txt""",
    flags=(
        Flag("RUN", "RUN", "the run's folder; it need not be there yet", path_of, needed=True),
        Flag("--every", "SECONDS", "between two looks", number(float, "seconds", 0.1, most=3600), 1.0),
        Flag("--once", "", "print one frame, and end"),
    ),
)

WHY = Verb(
    name="why",
    line="say why a living run does not move",
    text="""\
Looks at all ranks of a living run and says which of them it waits for, and for what: the first message or
decision that one rank has sent and another has not got, a rank that is in the user's code or loads data, one
that is stopped. Below that: what every rank is at, and the Python stacks of all its threads.

The run continues undisturbed. It must have been started by rrfp launch, on this machine, by this user.
SIGUSR1 to rrfp launch prints the same there. A run that stalls prints it by itself before it ends.""",
    notes="""\
exit status: 0 the run moves, 1 it does not, 2 invalid arguments, 130 interrupted

examples:
  rrfp why runs/quickstart
  watch -n 10 'rrfp why runs/quickstart | head -5'""",
    flags=(Flag("RUN", "RUN", "the run's folder, such as runs/quickstart", path_of, needed=True),),
    at_once=True,
)

COMPLETION = Verb(
    name="completion",
    line="print what completes these commands in your shell",
    text="""\
Prints functions of a shell that complete the commands, their flags and the names of files:

  eval "$(rrfp completion bash)"        in ~/.bashrc
  eval "$(rrfp completion zsh)"         in ~/.zshrc, after compinit""",
    flags=(Flag("SHELL", "SHELL", "yours", choices=["bash", "zsh"], needed=True),),
)

IN_ORDER = (TRAIN, LAUNCH, SIM, PLAN, COMPILE, DOCTOR, EXPORT, REPORT, TOP, WHY, COMPLETION)
VERBS = {verb.name: verb for verb in IN_ORDER}
"""By name, in the order of `rrfp --help`."""
