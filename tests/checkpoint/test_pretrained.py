"""Initial parameters from safetensors files."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rrfp_jax.errors import UsageError
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.model.sharding import Sharding
from rrfp_jax.runtime.programs.compiler import Compiler
from rrfp_jax.runtime.programs.initial import InitialParams
from rrfp_jax.weights import Tensor, pretrained
from tests.support import toy


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def folder(tmp_path):
    """Two files of one model, as others would have written them."""
    random = np.random.default_rng(0)
    embedding = random.standard_normal((toy.VOCABULARY, toy.WIDTH)).astype(ml_dtypes.bfloat16)
    first = {"wte.weight": embedding, "step": np.array(3)}
    second = {"lm_head.weight": random.standard_normal((toy.VOCABULARY, toy.WIDTH)).astype(np.float32)}
    for i in range(toy.BLOCKS):
        second[f"h.{i}.up.weight"] = random.standard_normal((2 * toy.WIDTH, toy.WIDTH)).astype(np.float32)
        second[f"h.{i}.down.weight"] = random.standard_normal((toy.WIDTH, 2 * toy.WIDTH)).astype(np.float32)
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    return tmp_path


def names(path):
    """Where the toy model's parameters are in those files; the biases are not there."""
    layer, name = path.split(".")
    if layer == "0":
        return "wte.weight"
    if layer == str(toy.BLOCKS + 1):
        return Tensor("lm_head.weight", np.transpose)
    return None if name == "bias" else Tensor(f"h.{int(layer) - 1}.{name}.weight", np.transpose)


def test_a_stage_gets_its_parameters_from_them_and_asks_for_no_others(folder):
    pipe, asked = toy.pipeline(), []
    fields = {
        k: jax.ShapeDtypeStruct(v.shape, jnp.asarray(v).dtype) for k, v in toy.microbatches()[0].items()
    }
    init = pretrained(folder, lambda path: asked.append(path) or names(path))
    device = jax.devices()[0]
    shapes, compiler = pipe.shapes(fields), Compiler(StageMesh((device,)))
    make = InitialParams(
        pipe=pipe,
        shapes=shapes,
        fields=fields,
        seed=0,
        init=init,
        owners={},
        compiler=compiler,
        sharding=Sharding(),
    )
    params = make.of(range(2))
    assert set(asked) == {"0.table", "1.up", "1.down", "1.bias"}
    stored = load_file(folder / "model-2.safetensors")
    assert (params["1"]["up"] == stored["h.0.up.weight"].T).all()
    assert (params["1"]["down"] == stored["h.0.down.weight"].T).all()
    assert (params["1"]["bias"] == 0).all()  # the layer's own
    assert params["0"]["table"].dtype == np.float32 and (params["0"]["table"] != 0).all()


def test_values_are_those_of_the_file(folder):
    given = pretrained(folder / "model-1.safetensors", lambda path: path)("wte.weight", spec(13, 16))
    assert given.shape == (13, 16) and given.dtype == np.float32
    again = pretrained(folder, {"x": "wte.weight"}.get)("x", spec(13, 16, dtype=jnp.bfloat16))
    assert again.dtype == ml_dtypes.bfloat16 and (again.astype(np.float32) == given).all()


def test_what_is_not_mapped_keeps_its_own_value(folder):
    assert pretrained(folder, {}.get)("3.up", spec(2)) is None


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "wanted", "told"),
        [
            ("other", spec(3), "no tensor 'other' in .*model-1.safetensors and 1 more"),
            ("lm_head.weight", spec(16, 13), r"\[16, 13\], tensor 'lm_head.weight' \[13, 16\] as stored"),
            ("step", spec(), "step is float32, tensor 'step' int64"),
        ],
    )
    def test_tensors_that_do_not_fit(self, folder, path, wanted, told):
        with pytest.raises(UsageError, match=told):
            pretrained(folder, lambda path: path)(path, wanted)

    def test_values_that_are_too_large(self, folder):
        save_file({"w": np.array([1.0, -1e5, 1e6, np.inf])}, folder / "large.safetensors")
        init = pretrained(folder / "large.safetensors", lambda path: "w")
        said = "^w is float16, too small for 2 values such as -100000 of tensor 'w' .float64.; give"
        with pytest.raises(UsageError, match=said):
            init("w", spec(4, dtype=jnp.float16))
        for dtype in (jnp.bfloat16, jnp.float32):  # infinite is what was infinite
            assert np.isinf(init("w", spec(4, dtype=dtype))).tolist() == [False, False, False, True]

    @pytest.mark.parametrize("files", [None, 5, [None]], ids=str)
    def test_no_files_at_all(self, files):
        with pytest.raises(UsageError, match=rf"files={re.escape(repr(files))}: give a safetensors file"):
            pretrained(files, {})

    def test_files_that_are_none(self, tmp_path, folder):
        (tmp_path / "bad.safetensors").write_bytes(b"not one of them")
        (tmp_path / "empty").mkdir()
        for files in (tmp_path / "bad.safetensors", tmp_path / "none.safetensors", tmp_path / "empty", []):
            with pytest.raises(UsageError):
                pretrained(files, {}.get)

    def test_two_files_of_different_models(self, folder):
        save_file({"wte.weight": np.ones(3)}, folder / "other.safetensors")
        with pytest.raises(UsageError, match=r"'wte.weight' is in .*model-1.*other"):
            pretrained(folder, {}.get)


@pytest.mark.parametrize(
    ("map_of_names", "said"),
    [
        ({"0.tabel": "wte.weight"}, "0.table: not in the map of names"),
        ({"0.table": Tensor("wte.weight", lambda w: w.reshape(7))}, "0.table: the transform of tensor"),
        (
            {"0.table": ("wte.weight", np.transpose)},
            r"0.table: \('wte.weight', .* give its name, ",
        ),
        (None, "names=None"),
    ],
    ids=["misspelt", "transform", "tuple", "none"],
)
def test_a_wrong_map_of_names(folder, map_of_names, said):
    wanted = spec(toy.VOCABULARY, toy.WIDTH)
    with pytest.raises(UsageError, match=said):
        pretrained(folder, map_of_names)("0.table", wanted)
