"""The goldens' own rules, on small values; a producer is run once, and two checkouts are kept apart."""

import json
import subprocess
import time

import jax
import jax.numpy as jnp
import pytest

from tests.golden import __main__ as command
from tests.golden import checkout, comparing, programs, refusals, suite
from tests.golden.folders import keys
from tests.golden.producing import PRODUCERS, Given, produce
from tests.golden.small_models import MODELS

ONE = "messages/zb-h1"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": [1, 2]}, {"a": [1, 3]}, ("['a'][1]", 2, 3)),
        ([1], [1, 2], ("[1]", comparing.MISSING, 2)),
        ({"a": 1, "b": 2}, {"a": 1}, ("['b']", 2, comparing.MISSING)),
        (1, 1.0, ("", 1, 1.0)),
        (None, {}, ("", None, {})),
    ],
)
def test_the_first_difference(old, new, expected):
    assert comparing.first_difference(old, new) == expected


def goldens(**found):
    return {"goldens": found, "failed": {}}


@pytest.mark.parametrize(
    ("old", "new", "accept", "good", "said"),
    [
        ({"x": 1}, {"x": 1}, "", True, "equal"),
        ({"x": 1}, {"x": 2}, "", False, "x: 1 -> 2"),
        ({"x": {"k": [1, 2]}}, {"x": {"k": [1, 3]}}, "", False, "x[k][1]: 2 -> 3"),
        ({"x": 1}, {"x": 2}, "x: because", True, "accepted: x (because)"),
        ({"x": {"k": 1, "l": 1}}, {"x": {"k": 2, "l": 1}}, "# why\nx[k]: because", True, "1 accepted"),
        ({"x": {"k": 1, "l": 1}}, {"x": {"k": 2, "l": 2}}, "x[k]: because", False, "x[l]: 1 -> 2"),
        ({"x": {"[a]": 1}}, {"x": {"[a]": 2}}, "x[[a]]: because", True, "accepted"),
        ({"x": 1}, {"x": 1}, "x: because", False, "fits no difference"),
        ({"x": 1}, {}, "", False, "x: 1 -> (missing)"),
        ({"suite/durations": 1}, {"suite/durations": 2}, "", True, "1 -> 2"),
    ],
)
def test_what_differs_is_accepted_with_a_reason_only(old, new, accept, good, said):
    lines, all_good = comparing.report(goldens(**old), goldens(**new), comparing.accepted(accept))
    assert all_good == good and said in "\n".join(lines)


def test_an_accepted_difference_without_a_reason_is_refused():
    with pytest.raises(SystemExit, match="has no reason"):
        comparing.accepted("losses/tied")


def test_a_reason_is_stale_only_if_all_goldens_are_compared():
    lines, good = comparing.report(goldens(), goldens(), {"x": "because"}, all_of_them=False)
    assert good and lines == []


def test_a_golden_that_fails_is_neither_equal_nor_accepted():
    failed = {"goldens": {}, "failed": {"x": "Traceback\nValueError: no"}}
    lines, good = comparing.report(failed, failed, {"x": "because"})
    assert not good and "x" in lines[0] and "ValueError: no" in lines[0]


def test_a_table_is_produced_and_who_raises_is_told(tmp_path):
    def broken(given):
        raise ValueError("no")

    table = {"good": lambda given: {"a": (1, 2)}, "broken": broken}
    found = produce("p", table, Given(tmp_path))
    assert found["goldens"] == {"p/good": {"a": [1, 2]}} and "ValueError: no" in found["failed"]["p/broken"]
    assert list(produce("p", table, Given(tmp_path), ["good"])["seconds"]) == ["p/good"]


@pytest.mark.slow(reason="5 s: three starts; the others compare and produce in this process")
def test_one_producer_is_equal_twice_and_a_changed_golden_is_found(tmp_path, capsys):
    written = tmp_path / "written"
    assert command.main([f"--write={written}", f"--only={ONE}"]) == 0
    file = written / "messages.json"
    found = json.loads(file.read_text())
    assert list(found["goldens"]) == [ONE]
    assert command.main([f"--against={written}", f"--only={ONE}"]) == 0
    assert "equal" in capsys.readouterr().out
    found["goldens"]["messages/bf"] = "not asked for"
    found["goldens"][ONE]["seed 3"][1]["dispatched"] = "F0"
    file.write_text(json.dumps(found))
    assert command.main([f"--against={written}", f"--only={ONE}"]) == 1
    assert f"{ONE}[seed 3][1]['dispatched']: \"F0\" -> " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no golden has 'messages/none' in its name"):
        command.main([f"--against={written}", "--only=messages/none"])


def test_an_environment_has_the_packages_and_a_checkout_its_own_code(tmp_path):
    python = checkout.environment(tmp_path / "environment")
    package = tmp_path / "checkout" / "rrfp_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    said = subprocess.run(
        [python, "-c", "import numpy, rrfp_jax; print(rrfp_jax.__file__)"],
        cwd=package.parent,
        env=checkout.variables(package.parent),
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == str(package / "__init__.py")


def test_programs_are_told_apart_by_what_they_compute_not_by_names():
    def add(x):
        return jax.jit(lambda y: jnp.where(y > 0, y, 0.0))(x) + 1.0

    def renamed(z):
        def inner(w):
            return jnp.where(w > 0, w, 0.0)

        return jax.jit(inner)(z) + 1.0

    def other(x):
        return jax.jit(lambda y: jnp.where(y > 0, y, 1.0))(x) + 1.0

    texts = [jax.jit(function).lower(jnp.zeros(3)).as_text() for function in (add, renamed, other)]
    first, second, third = map(programs.normal, texts)
    assert texts[0] != texts[1] and first == second != third
    with programs.programs_seen() as seen:
        jax.jit(add).lower(jnp.zeros(3)).compile()
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("rrfp.Mesh(pp=0)", ["UsageError", "Mesh(pp=0): a pipeline needs a whole number of stages"]),
        ("1 + 1", ["no refusal", "int"]),
        ("1 / 0", ["ZeroDivisionError", "no refusal"]),
    ],
)
def test_a_refusal_is_its_type_and_its_sentence(expression, expected, tmp_path):
    import rrfp_jax as rrfp

    kind, sentence = refusals.refusal(expression, {"rrfp": rrfp}, tmp_path)
    assert kind == expected[0] and sentence.startswith(expected[1])


def test_an_expression_without_an_end_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(refusals, "LIMIT_SECONDS", 1)
    before = refusals.signal.signal(refusals.signal.SIGALRM, refusals.no_end)
    try:
        found = refusals.refusal("sleep(60)", {"sleep": time.sleep}, tmp_path)
    finally:
        refusals.signal.signal(refusals.signal.SIGALRM, before)
    assert found == ["TooLong", "no refusal"]


def test_keys_and_assertions():
    assert keys({"a": [{"b": 1}, {"b": None}], "c": True}) == [
        ".a[].b: number",
        ".a[].b: NoneType",
        ".c: bool",
    ]
    import ast

    assert (
        suite.counted(ast.parse("assert x\nwith pytest.raises(A): f()\nnp.testing.assert_equal(1, 1)")) == 3
    )


def test_there_are_twenty_models_and_every_producer_has_a_file():
    assert len(MODELS) == 20
    assert all((checkout.ROOT / "tests" / "golden" / f"{name}.py").exists() for name in PRODUCERS)
    assert command.needed(["losses/tied"]) == ["losses"] and command.needed(["tied"]) == PRODUCERS
