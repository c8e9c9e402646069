"""What `on_device.py` measures: products, elementwise, attention, then a perceptron, ResNet-50, GPT-2 and a Llama
block, forward and train, in JAX and PyTorch. Nothing is imported or allocated before it is asked for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
Step = Callable[[], Any]


@dataclass(frozen=True)
class Program:
    """`capture(platform)` gives the workload without a device; `make(device)` a step that runs on one."""

    name: str
    capture: Callable[[str], Any]
    make: Callable[[str], Step]


@dataclass(frozen=True)
class Sizes:
    """How large: of a GPU, or tiny for a rehearsal."""

    products: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    elements: int = 8192
    attention: tuple[tuple[int, int, int, int], ...] = ((8, 16, 1024, 64), (2, 16, 4096, 128))
    mlp: tuple[int, int, int] = (4096, 4096, 16384)
    images: tuple[int, int] = (32, 224)
    gpt2: tuple[int, int, int, int, int] = (12, 768, 12, 4, 1024)
    llama: tuple[int, int, int, int, int] = (1, 4096, 32, 1, 2048)
    dtype: str = "bfloat16"


TINY = Sizes(
    (64, 128), 128, ((1, 2, 64, 16),), (64, 64, 128), (1, 64), (1, 64, 2, 1, 64), (1, 128, 2, 1, 64), "float32"
)


def example(name: str) -> ModuleType:
    """An example program as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


# JAX


def jax_program(name: str, function: Callable[..., Any], shapes: tuple[Any, ...]) -> Program:
    """A function of arrays of the given shapes (pytrees)."""

    def capture(platform: str) -> Any:
        import stablecast

        return stablecast.capture(function, *shapes, platform=platform)

    def make(device: str) -> Step:
        import jax

        del device
        compiled = jax.jit(function).lower(*shapes).compile()
        args = jax.tree.map(lambda shape: jax.numpy.zeros(shape.shape, shape.dtype), shapes)
        step = lambda: jax.block_until_ready(compiled(*args))  # noqa: E731
        step.compiled = compiled  # type: ignore[attr-defined]
        return step

    return Program(f"jax_{name}", capture, make)


def jax_programs(sizes: Sizes) -> list[Program]:
    """Small kernels, then models, forward and train."""
    import jax
    import jax.numpy as jnp

    dtype = jnp.dtype(sizes.dtype)
    short = {"bfloat16": "bf16", "float32": "f32"}[sizes.dtype]

    def shape(*dims: int, of: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(dims, of)

    found = [jax_program(f"gemm_{n}", jnp.matmul, (shape(n, n), shape(n, n))) for n in sizes.products]
    square = shape(sizes.elements, sizes.elements)
    found.append(jax_program("add", jnp.add, (square, square)))
    found.append(jax_program("gelu", jax.nn.gelu, (square,)))
    for batch, heads, sequence, width in sizes.attention:
        one = shape(batch, sequence, heads, width)
        found.append(
            jax_program(f"attention_{batch}x{heads}x{sequence}x{width}", jax.nn.dot_product_attention, (one,) * 3)
        )
    rows, inside, hidden = sizes.mlp
    layers = (shape(rows, inside), shape(inside, hidden), shape(hidden, inside))

    def mlp(x: Any, w1: Any, w2: Any) -> Any:
        return jnp.sum(jax.nn.gelu(x @ w1) @ w2)

    found += [jax_program("mlp", mlp, layers), jax_program("mlp_train", jax.grad(mlp, argnums=(1, 2)), layers)]
    return [*found, *_jax_models(sizes, short, shape)]


def _jax_models(sizes: Sizes, dtype: str, shape: Callable[..., Any]) -> list[Program]:
    import jax.numpy as jnp

    resnet, llama = example("resnet"), example("llama")
    batch, image = sizes.images
    state, data = resnet.make_args(depth=50, batch=batch, image=image, dtype=dtype)
    found = [
        jax_program(
            "resnet50", lambda p, s, d: resnet.loss_fn(p, s, d)[0], (state["params"], state["statistics"], data)
        ),
        jax_program("resnet50_train", resnet.train_step, (state, data)),
    ]
    layers, width, heads, rows, sequence = sizes.gpt2
    params = gpt2_shapes(shape, layers, width)
    tokens = shape(rows, sequence, of=jnp.int32)
    forward, train = partial(gpt2_loss, heads), partial(gpt2_step, heads)
    found += [jax_program("gpt2", forward, (params, tokens)), jax_program("gpt2_train", train, (params, tokens))]
    layers, width, heads, rows, sequence = sizes.llama
    args = llama.make_args(layers=layers, d_model=width, heads=heads, batch=rows, seq=sequence, vocab=1024, dtype=dtype)
    found += [
        jax_program("llama_block", llama.loss_fn, (args[0]["params"], args[1])),
        jax_program("llama_block_train", llama.train_step, args),
    ]
    return found


def gpt2_shapes(shape: Callable[..., Any], layers: int, width: int, vocab: int = 50304, positions: int = 1024) -> Any:
    """Parameters of GPT-2 as shapes."""
    block = {
        "ln1": shape(width), "qkv": shape(width, 3 * width), "out": shape(width, width),
        "ln2": shape(width), "up": shape(width, 4 * width), "down": shape(4 * width, width),
    }  # fmt: skip
    return {
        "embed": shape(vocab, width), "place": shape(positions, width), "blocks": [block] * layers, "ln": shape(width)
    }  # fmt: skip


def gpt2_loss(heads: int, params: Any, tokens: Any) -> Any:
    """Mean cross entropy of the next token."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale

    x = params["embed"][tokens] + params["place"][: tokens.shape[1]]
    for number, block in enumerate(params["blocks"]):
        with jax.named_scope(f"block{number}"):
            qkv = (norm(x, block["ln1"]) @ block["qkv"]).reshape(*tokens.shape, 3, heads, -1)
            mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
            x = x + mixed.reshape(x.shape) @ block["out"]
            x = x + jax.nn.gelu(norm(x, block["ln2"]) @ block["up"]) @ block["down"]
    logits = (norm(x, params["ln"]) @ params["embed"].T).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -picked.mean()


def gpt2_step(heads: int, params: Any, tokens: Any) -> Any:
    """One step of gradient descent."""
    import jax

    loss, grads = jax.value_and_grad(partial(gpt2_loss, heads))(params, tokens)
    return jax.tree.map(lambda param, grad: param - 1e-4 * grad, params, grads), loss


# PyTorch


def torch_program(
    name: str, build: Callable[[str], Any], step: Callable[..., Any], inputs: Callable[[], Any]
) -> Program:
    """`build(device)` gives the state, `inputs()` tensors on the host, `step(*state, *inputs)` runs once."""

    def capture(platform: str) -> Any:
        import stablecast

        device = "cpu" if platform == "cpu" else "cuda"
        return stablecast.capture_torch(lambda: build(device), step, inputs, device=device, name=name)

    def make(device: str) -> Step:
        state = build(device)
        parts = state if isinstance(state, tuple) else (state,)
        given = [tensor.to(device) for tensor in inputs()]
        return lambda: step(*parts, *given)

    return Program(f"torch_{name}", capture, make)


def torch_programs(sizes: Sizes) -> list[Program]:
    """The same programs in PyTorch."""
    import torch

    dtype = getattr(torch, sizes.dtype)

    def filled(*dims: int) -> Any:
        return torch.ones(dims, dtype=dtype)

    def plain(name: str, step: Callable[..., Any], *shapes: tuple[int, ...]) -> Program:
        return torch_program(name, lambda _: (), step, lambda: tuple(filled(*shape) for shape in shapes))

    functional = torch.nn.functional
    found = [plain(f"gemm_{n}", torch.matmul, (n, n), (n, n)) for n in sizes.products]
    square = (sizes.elements, sizes.elements)
    found += [plain("add", torch.add, square, square), plain("gelu", functional.gelu, square)]
    for batch, heads, sequence, width in sizes.attention:
        shapes = ((batch, heads, sequence, width),) * 3
        name = f"attention_{batch}x{heads}x{sequence}x{width}"
        found.append(plain(name, functional.scaled_dot_product_attention, *shapes))
    rows, inside, hidden = sizes.mlp

    def mlp(device: str) -> Any:
        layers = torch.nn.Sequential(torch.nn.Linear(inside, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, inside))
        return layers.to(device, dtype)

    batch = lambda: (filled(rows, inside),)  # noqa: E731
    found += [torch_program("mlp", mlp, forward, batch), torch_program("mlp_train", mlp, train_plain, batch)]
    return [*found, *_torch_models(sizes, dtype)]


def forward(model: Any, *inputs: Any) -> Any:
    """A forward pass without gradients."""
    import torch

    with torch.no_grad():
        return model(*inputs)


def train_plain(model: Any, *inputs: Any) -> tuple[Any, ...]:
    """Forward and backward; the gradients."""
    for parameter in model.parameters():
        parameter.grad = None
    model(*inputs).float().sum().backward()
    return tuple(parameter.grad for parameter in model.parameters())


def _torch_models(sizes: Sizes, dtype: Any) -> list[Program]:
    resnet, llama = example("torch_resnet"), example("torch_llama")
    batch, image = sizes.images

    def network(device: str) -> Any:
        return resnet.ResNet().to(device, dtype)

    def network_and_optimizer(device: str) -> Any:
        import torch

        model = network(device)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def images(labelled: bool) -> Any:
        pixels, labels = resnet.inputs(batch, image)
        return (pixels.to(dtype), labels) if labelled else (pixels.to(dtype),)

    found = [
        torch_program("resnet50", network, forward, lambda: images(False)),
        torch_program("resnet50_train", network_and_optimizer, resnet.step, lambda: images(True)),
    ]
    layers, width, heads, rows, sequence = sizes.gpt2
    gpt2 = partial(_gpt2, layers, width, heads, sequence, dtype)
    tokens = lambda: (llama.inputs(rows, sequence, 1000)[0],)  # noqa: E731
    found += [torch_program("gpt2", gpt2, forward, tokens), torch_program("gpt2_train", gpt2, train_plain, tokens)]
    layers, width, heads, rows, sequence = sizes.llama
    config = llama.Config(1024, width, 4 * width, layers, heads, heads)
    pairs = lambda: llama.inputs(rows, sequence)  # noqa: E731
    found += [
        torch_program(
            "llama_block", lambda device: llama.model(config, sizes.dtype, device), forward, lambda: pairs()[:1]
        ),
        torch_program("llama_block_train", lambda device: llama.build(config, sizes.dtype, device), llama.step, pairs),
    ]
    return found


def _gpt2(layers: int, width: int, heads: int, sequence: int, dtype: Any, device: str) -> Any:
    """Hugging Face's GPT-2, of which the logits are taken."""
    import torch

    from stablecast.validation.suites.captures import import_models

    hub = import_models("transformers")
    config = hub.GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=max(sequence, 64), use_cache=False)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = hub.GPT2LMHeadModel(config)

        def forward(self, tokens: Any) -> Any:
            return self.model(tokens).logits

    return Logits().eval().to(device, dtype)
