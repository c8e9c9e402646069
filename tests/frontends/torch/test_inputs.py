"""PyTorch programs as INPUT of the command line and of the public face."""

import json
from pathlib import Path

import pytest

import stablecast
from stablecast._predict import Options, Session
from stablecast.frontends.arguments import ArgumentOptions
from stablecast.frontends.registry import Request, frontend_for
from stablecast.ir.errors import InputError

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

SCRIPT = """
import torch, stablecast

def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def make(batch=32):
    return torch.empty(batch, 64, device="meta"), torch.empty(batch, dtype=torch.long, device="meta")

@stablecast.workload(args=make)
def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
"""

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def script(tmp_path: Path) -> str:
    path = tmp_path / "torch_model.py"
    path.write_text(SCRIPT)
    return f"{path}:build,step"


def test_a_script_with_build_and_step(tmp_path: Path) -> None:
    text = script(tmp_path)
    assert frontend_for(Request(text)).name == "torch-script"
    for batch in (32, 64):
        options = Options(arguments=ArgumentOptions(settings=[f"batch={batch}"]))
        work = Session(text, options).work()
        assert work["matmul_flops"] == 2 * batch * (2 * 64 * 128 + 3 * 128 * 10)
    prediction = Session(text, Options()).predict("h100-sxm")
    assert prediction.complete
    assert {row.klass for row in prediction.kernels} >= {"matmul", "elementwise"}


def test_wrong_functions_are_one_line(tmp_path: Path) -> None:
    text = script(tmp_path)
    with pytest.raises(InputError, match="has no function 'stepp'; did you mean step"):
        stablecast.load(text + "p")
    with pytest.raises(InputError, match="does not name two functions"):
        stablecast.load(text + ",more")
    with pytest.raises(InputError, match="has no parameter 'size' to --set"):
        stablecast.load(text, ArgumentOptions(settings=["size=3"]))


def test_a_module_from_python() -> None:
    workload = stablecast.capture(torch.nn.Linear(64, 32), torch.empty(8, 64))
    assert Session(workload, Options()).work()["matmul_flops"] == 2 * 8 * 64 * 32


def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert frontend_for(Request(str(path))).name == "hugging-face"
    model = {"batch": "2", "seq": "16", "mode": "forward", "dtype": "f32"}
    work = Session(path, Options(arguments=ArgumentOptions(model=model))).work()
    assert work["matmul_flops"] > 2 * 2 * 16 * 64 * 256
    with pytest.raises(InputError, match="unknown mode 'fly'"):
        stablecast.load(path, ArgumentOptions(model={"mode": "fly"}))
    with pytest.raises(InputError, match="--batch 'many' is not a whole number"):
        stablecast.load(path, ArgumentOptions(model={"batch": "many"}))


def test_other_json_is_not_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert frontend_for(Request(str(path))).name == "file"


def test_a_step_without_inputs_says_how_to_give_them(tmp_path: Path) -> None:
    text = script(tmp_path)
    path = Path(text.removesuffix(":build,step"))
    path.write_text(path.read_text().replace("@stablecast.workload(args=make)\n", ""))
    with pytest.raises(
        InputError, match=r"missing 2 required positional arguments: 'x' and 'y'.*--args .*:make_inputs"
    ):
        stablecast.load(text)
    options = ArgumentOptions(arrays=["x=f32[8,64]", "y=i64[8]"])
    assert Session(text, Options(arguments=options)).work()["matmul_flops"] == 2 * 8 * (2 * 64 * 128 + 3 * 128 * 10)
