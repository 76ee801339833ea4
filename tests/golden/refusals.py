"""The corpus of bad inputs: type and sentence of every refusal."""

import os
import re
import signal

from rrfp_jax.errors import TrainingError
from tests.bad_inputs import namespace
from tests.bad_inputs.test_refused import CASES, STARTS

LIMIT_SECONDS = 120
"""Of an expression, on however busy a machine; who is refused at once needs a thousandth of it."""


class Started(Exception):
    """It was not refused."""


def refusal(expression, names, folder):
    """What an expression is refused with: type and sentence, without what differs by machine."""
    signal.alarm(LIMIT_SECONDS)
    try:
        value = eval(expression, dict(names))
    except (ValueError, TrainingError) as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return [type(error).__name__, same_everywhere(first, folder)]
    except BaseException as error:
        return [type(error).__name__, "no refusal"]
    finally:
        signal.alarm(0)
    return ["no refusal", type(value).__name__]


def same_everywhere(text, folder):
    text = text.replace(str(folder), "<folder>").replace(str(namespace.ROOT), "<root>")
    return re.sub(r"0x[0-9a-f]{6,}|/tmp/\S+", "<...>", text)


class TooLong(BaseException):
    """It has no end."""


def no_end(*arguments):
    raise TooLong


def of_file(name):
    def make(given):
        signal.signal(signal.SIGALRM, no_end)
        folder = given.folder / name
        folder.mkdir()
        namespace.fill(folder)
        os.chdir(folder)
        for owner, attribute in STARTS:
            setattr(owner, attribute, started)
        names = namespace.space()
        return {expression: refusal(expression, names, folder) for expression, _ in CASES[name]}

    return make


def started(*arguments, **named):
    raise Started


TABLE = {name: of_file(name) for name in CASES}
