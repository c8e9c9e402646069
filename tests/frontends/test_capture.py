"""Captures: from functions, scripts and files, and back from disk."""

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import stablecast
from stablecast.frontends.files import load
from stablecast.frontends.script import ArgumentOptions, capture_script, run_script
from stablecast.ir import capture_file
from stablecast.ir.errors import InputError
from stablecast.ir.program import Argument, Mesh, Stage
from stablecast.ir.reader import read
from stablecast.ir.schedule import Event, Launch, LaunchTable, Schedule
from stablecast.ir.types import Symbol
from stablecast.ir.workload import FORMAT, Module, Phase, Role, Workload

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)

SCRIPT = """
import jax, jax.numpy as jnp, stablecast

def make(size=8, dtype="float32"):
    return (jax.ShapeDtypeStruct((size, size), dtype),)

@stablecast.workload(args=make)
def step(x):
    return x @ x

def bare(x, y):
    return x + y["a"]

def as_dict(size=4):
    return {"x": jnp.ones((size,)), "y": {"a": jnp.ones((size,))}}

if __name__ == "__main__":
    print("running")
    step(jnp.ones((16, 16)))
    step(jnp.ones((32, 32)))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(SCRIPT)
    return str(path)


def shapes(workload: Workload) -> list[str]:
    return [f"{argument.name}:{argument.type}" for argument in workload.args]


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "cpu"])
def test_functions_are_captured_for_devices_that_are_not_there(platform: str) -> None:
    workload = stablecast.capture(lambda x: jnp.tanh(x @ x), X, platform=platform)
    assert workload.platform == platform
    assert workload.num_devices == 1
    assert shapes(workload) == ["x:f32[8,8]"]
    assert [op.name for op in read(workload.modules[0].data).walk()] == ["stablehlo.dot_general", "stablehlo.tanh"]


def test_unused_arguments_keep_the_place_of_the_others() -> None:
    workload = stablecast.capture(lambda unused, tree, y: tree["b"] + y, X, {"a": X, "b": X}, X)
    assert [(argument.name, argument.kept_index) for argument in workload.args] == [("tree['b']", 2), ("y", 3)]


def test_values_static_parameters_and_keywords() -> None:
    def step(x: Any, power: int, *, bias: Any) -> Any:
        return x**power + bias

    workload = stablecast.capture(step, jnp.ones((3,)), power=3, bias=jnp.zeros((3,)), static=("power",))
    assert shapes(workload) == ["x:f32[3]", "bias:f32[3]"]


def test_the_annotation_gives_the_arguments() -> None:
    @stablecast.workload(args=lambda: (X,))
    def step(x: Any) -> Any:
        return x + 1

    assert shapes(stablecast.capture(step)) == ["x:f32[8,8]"]


def test_errors_of_user_code_are_one_line_with_its_place() -> None:
    def step(x: Any) -> Any:
        return x @ jnp.ones((3, 3))

    with pytest.raises(InputError, match=r"step cannot be traced: TypeError: dot_general.*test_capture.py:\d+\)"):
        stablecast.capture(step, X)
    with pytest.raises(InputError, match="unknown platform 'gpu'"):
        stablecast.capture(step, X, platform="gpu")
    with pytest.raises(InputError, match="capture needs a function, not a int"):
        stablecast.capture(3)  # type: ignore[arg-type]


def test_scripts_by_annotation_factory_and_arrays(script: str) -> None:
    assert shapes(capture_script(f"{script}:step", ArgumentOptions())) == ["x:f32[8,8]"]
    assert shapes(capture_script(f"{script}:step", ArgumentOptions(settings=["size=4", "dtype=bfloat16"]))) == [
        "x:bf16[4,4]"
    ]
    by_factory = ArgumentOptions(args=f"{script}:as_dict", settings=["size=6"])
    assert shapes(capture_script(f"{script}:bare", by_factory)) == ["x:f32[6]", "y['a']:f32[6]"]
    by_arrays = ArgumentOptions(arrays=["x=f32[5]", "y.a=f32[5]"])
    assert shapes(capture_script(f"{script}:bare", by_arrays)) == ["x:f32[5]", "y['a']:f32[5]"]


MESHES = """
import jax, jax.numpy as jnp, stablecast
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

def own(dp=1):
    mesh = AbstractMesh((dp, 2), ("dp", "tp"))
    return (jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("dp", "tp"))),)

def rows(*, rows=1):
    return (jax.ShapeDtypeStruct((8 * rows, 8), jnp.float32),)

@stablecast.workload(args=own)
def step(x):
    return x @ x

@stablecast.workload(args=rows)
def split(x):
    return jax.lax.with_sharding_constraint(x @ x.T, P("tp"))
"""


def test_mesh_axes_go_to_the_factory_and_the_rest_to_an_abstract_mesh(tmp_path: Path) -> None:
    path = tmp_path / "meshes.py"
    path.write_text(MESHES)
    options = ArgumentOptions()
    assert capture_script(f"{path}:step", options, mesh={"dp": 4}).num_partitions == 8
    assert capture_script(f"{path}:step", options, mesh={"dp": 4, "tp": 2}).num_partitions == 8
    both = capture_script(f"{path}:split", options, mesh={"rows": 2, "tp": 4})
    assert (shapes(both), both.num_partitions) == (["x:f32[16,8]"], 4)
    with pytest.raises(InputError, match=r"--mesh tp=3 fits neither .* of step nor .* \(dp=1,tp=2\)"):
        capture_script(f"{path}:step", options, mesh={"tp": 3})
    with pytest.raises(InputError, match="--mesh says dp=4, --set says dp=2"):
        capture_script(f"{path}:step", ArgumentOptions(settings=["dp=2"]), mesh={"dp": 4})
    by_factory = ArgumentOptions(args=f"{path}:own")
    assert capture_script(f"{path}:split", by_factory, mesh={"dp": 2, "tp": 2}).num_partitions == 4


def test_later_ways_replace_what_earlier_ones_gave(script: str) -> None:
    options = ArgumentOptions(arrays=["x=f32[2,2]"])
    assert shapes(capture_script(f"{script}:step", options)) == ["x:f32[2,2]"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", ArgumentOptions(), "has no function 'nothing'"),
        (
            "bare",
            ArgumentOptions(),
            r"nobody gave the arguments of bare\(x, y\); put @stablecast.workload.*--arg 'x=f32\[8,128\]'",
        ),
        ("step", ArgumentOptions(settings=["sise=3"]), "has no parameter 'sise' to --set; did you mean size"),
        ("bare", ArgumentOptions(arrays=["z=f32[1]"]), "bare has no parameter 'z'"),
        ("bare", ArgumentOptions(args="factory"), "--args 'factory' names no function"),
        ("bare", ArgumentOptions(arrays=["x=f32[1]", "y.a=f32[1]"], settings=["n=3"]), "--set has nothing to set"),
        ("step", ArgumentOptions(settings=["size='x'"]), "step cannot be traced: TypeError"),
    ],
)
def test_wrong_arguments(script: str, name: str, options: ArgumentOptions, message: str) -> None:
    with pytest.raises(InputError, match=message):
        capture_script(f"{script}:{name}", options)


def test_scripts_that_fail(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\nraise ValueError('boom')\n")
    with pytest.raises(InputError, match=r"broken.py raised ValueError: boom \(broken.py:2\)"):
        capture_script(f"{path}:step", ArgumentOptions())
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(InputError, match=r"ended the program \(exit 3\)"):
        capture_script(f"{path}:step", ArgumentOptions())
    with pytest.raises(InputError, match="there is no script"):
        capture_script(f"{tmp_path}/none.py:step", ArgumentOptions())


def test_running_a_script_captures_first_calls(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = run_script(Path(script), [], platform="tpu")
    assert list(recorded.workloads) == ["step"]
    assert shapes(recorded.workloads["step"]) == ["x:f32[16,16]"]
    assert capsys.readouterr().out == ""


def everything() -> Workload:
    made = stablecast.capture(lambda x: x + 1, X)
    return Workload(
        producer=made.producer,
        stage=Stage.PER_DEVICE,
        modules=(made.modules[0], Module("stage1", b"\x00binary\xff")),
        num_replicas=2,
        num_partitions=4,
        meshes=(Mesh("mesh", (("data", 4),), (3, 2, 1, 0)),),
        roles=(Role("first", "main", {"pipe": 0}, 0.8),),
        args=made.args,
        symbols=(Symbol("n", 1, None, 7),),
        phases=(Phase("decode", "first", 128),),
        schedule=Schedule({0: 1}, {2: (0, 1)}, (Event(0, 2),), (0, 1, 2), (2,)),
        launches=LaunchTable((Launch("aten::mm", ((2, 3), (3, 4)), ("bf16", "bf16"), 1, "mlp.up", "m.py:3", (0, 5)),)),
        source="m.py:step",
        platform="cuda",
        notes=("assumed",),
        metadata={"batch": 8},
    )


def test_a_capture_comes_back_as_it_was(tmp_path: Path) -> None:
    path, workload = tmp_path / "step.sc", everything()
    capture_file.write(workload, path)
    assert capture_file.read(path) == workload
    assert load(path) == workload
    assert capture_file.to_bytes(workload) == path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


def _rewritten(path: Path, **changes: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members["manifest.json"]) | changes
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, json.dumps(manifest) if name == "manifest.json" else data)


def test_damaged_newer_and_foreign_captures(tmp_path: Path) -> None:
    path = tmp_path / "step.sc"
    capture_file.write(everything(), path)
    whole = path.read_bytes()
    for cut in (10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="damaged capture"):
            load(path)
    path.write_bytes(whole)
    _rewritten(path, format=FORMAT + 1)
    with pytest.raises(InputError, match=f"has capture format {FORMAT + 1}; this stablecast reads up to {FORMAT}"):
        load(path)
    _rewritten(path, format=FORMAT, stage="nonsense")
    with pytest.raises(InputError, match="damaged capture"):
        load(path)
    _rewritten(path, kind="other")
    with pytest.raises(InputError, match="not a stablecast capture"):
        load(path)


def test_files_by_content(tmp_path: Path) -> None:
    text = b"module { func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> { %0 = stablehlo.negate %a : tensor<4xf32> return %0 : tensor<4xf32> } }"
    plain, packed = tmp_path / "plain.txt", tmp_path / "packed.bin"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text))
    assert load(plain).args == load(packed).args == (Argument("arg0", load(plain).args[0].type, kept_index=0),)
    hlo = tmp_path / "module.hlo"
    hlo.write_text(jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((4, 4))).as_text("hlo"))
    assert [op.name for op in read(load(hlo).modules[0].data).walk()] == ["stablehlo.dot", "stablehlo.tanh"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x1f\x8bnot gzip", "damaged gzip"),
        (b"HloModule broken {", "not HLO text"),
        (b"\x00\x01", "not a StableHLO"),
    ],
)
def test_files_that_are_nothing(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        load(path)
    with pytest.raises(InputError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(InputError, match="there is no file"):
        load(tmp_path / "none")


def test_an_uneven_sharding_names_the_argument() -> None:
    mesh = jax.sharding.AbstractMesh((16, 8), ("data", "model"))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "model"), None))
    uneven = jax.ShapeDtypeStruct((10, 3), jnp.float32, sharding=spec)
    with pytest.raises(
        InputError, match=r"dimension 0 of argument tree\['w'\], of size 10, is not divisible by data=16 x model=8"
    ):
        stablecast.capture(lambda x, tree: x.sum() + tree["w"], X, {"w": uneven})


def test_artefacts_of_jax_export(tmp_path: Path) -> None:
    exported = jax.export.export(jax.jit(lambda x: jnp.tanh(x @ x)), platforms=["tpu"])(X)
    path = tmp_path / "step.export"
    path.write_bytes(exported.serialize())
    workload = load(path)
    assert workload.platform == "tpu"
    assert [op.name for op in read(workload.modules[0].data).walk()] == ["stablehlo.dot_general", "stablehlo.tanh"]
    path.write_bytes(exported.serialize()[:-200])
    with pytest.raises(InputError, match=r"not a jax.export artefact|not a StableHLO module"):
        load(path)


def test_partition_specs_refer_to_the_mesh_that_is_given(tmp_path: Path) -> None:
    """`--mesh`, the annotation or `mesh=` make the abstract mesh; without any, one line says what is missing."""
    spec = jax.sharding.PartitionSpec
    x = jax.ShapeDtypeStruct((16384, 1024), jnp.float32, sharding=spec("data", None))

    def step(w: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x @ w, spec("data", "model")).sum()

    workload = stablecast.capture(step, X.update(shape=(1024, 1024)), x, mesh={"data": 16384, "model": 8})
    assert workload.stage is Stage.GLOBAL_SDY
    assert workload.num_devices == 131_072
    assert workload.args[1].sharding is not None
    assert [str(axis) for dim in workload.args[1].sharding.dims for axis in dim] == ["data"]
    with pytest.raises(InputError, match="there is no mesh; give --mesh"):
        stablecast.capture(lambda x: x + 1, x)
    script = tmp_path / "sharded.py"
    script.write_text(
        "import jax, jax.numpy as jnp, stablecast\n"
        "from jax.sharding import PartitionSpec as P\n"
        "@stablecast.workload(args=lambda: (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=P('data')),), mesh={'data': 8})\n"
        "def step(x):\n    return x.sum()\n"
    )
    assert capture_script(f"{script}:step", ArgumentOptions()).num_devices == 8
    assert capture_script(f"{script}:step", ArgumentOptions(), mesh={"data": 4}).num_devices == 4


def test_a_factory_gets_the_axes_of_the_mesh_from_the_library_too() -> None:
    def make(rows: int = 8, data: int = 1) -> tuple[Any, ...]:
        mesh = jax.sharding.AbstractMesh((data,), ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        return (jax.ShapeDtypeStruct((rows * data, 4), jnp.float32, sharding=sharding),)

    @stablecast.workload(args=make)
    def step(x: Any) -> Any:
        return jnp.sum(x)

    workload = stablecast.capture(step, mesh={"data": 16})
    assert workload.num_devices == 16
    assert str(workload.args[0].type) == "f32[128,4]"
    with pytest.raises(InputError, match="--mesh model=2 fits neither"):
        stablecast.capture(step, mesh={"data": 16, "model": 2})
