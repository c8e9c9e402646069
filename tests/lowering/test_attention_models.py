"""Attention recognised in captures of flax modules, of Hugging Face models, and of PyTorch's own decomposition."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stablecast.ir.device_program import DeviceProgram, Kernel
from stablecast.ir.kernels import KernelClass, KernelRow
from stablecast.ir.reader import read
from stablecast.lowering.device import lower
from stablecast.lowering.target import Target

Lower = Callable[..., DeviceProgram]
FLASH = Target(attention="flash")
BATCH, SEQ, HEADS, D = 2, 32, 4, 16
WIDTH, WORDS = HEADS * D, 100


def kernels_of(program: DeviceProgram) -> list[KernelRow]:
    return [program.table.rows[node.row] for node in program.body if isinstance(node, Kernel)]


def attention(program: DeviceProgram) -> list[tuple[str, int]]:
    """Direction and causality of each attention kernel, after a look at its sizes."""
    rows = [row for row in kernels_of(program) if row.klass == KernelClass.ATTENTION]
    for row in rows:
        assert (row.batch * row.hq, row.sq, row.skv, row.d) == (BATCH * HEADS, SEQ, SEQ, D)
    return [(row.direction, row.causal) for row in rows]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True])
def test_linen(lowered: Lower, causal: bool, dropout: float) -> None:
    linen = pytest.importorskip("flax.linen")
    module = linen.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16, dropout_rate=dropout, deterministic=False)

    def loss(weights: Any, x: Any) -> Any:
        mask = linen.make_causal_mask(x[..., 0]) if causal else None
        out = module.apply(weights, x, mask=mask, rngs={"dropout": jax.random.key(0)})
        return out.astype(jnp.float32).sum()

    def started(x: Any) -> Any:
        return module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    weights = jax.eval_shape(started, x)
    both = [("fwd", int(causal)), ("bwd", int(causal))]
    assert attention(lowered(loss, weights, x, target=FLASH)) == both[:1]
    assert attention(lowered(jax.value_and_grad(loss), weights, x, target=FLASH)) == both


@pytest.mark.parametrize("causal", [False, True])
def test_nnx(lowered: Lower, causal: bool) -> None:
    nnx = pytest.importorskip("flax.nnx")

    def made() -> Any:
        return nnx.MultiHeadAttention(HEADS, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0))

    form, weights = nnx.split(nnx.eval_shape(made))

    def loss(weights: Any, x: Any) -> Any:
        mask = nnx.make_causal_mask(x[..., 0]) if causal else None
        return nnx.merge(form, weights)(x, mask=mask).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    both = [("fwd", int(causal)), ("bwd", int(causal))]
    assert attention(lowered(loss, weights, x, target=FLASH)) == both[:1]
    grad = jax.value_and_grad(loss, allow_int=True)
    assert attention(lowered(grad, weights, x, target=FLASH)) == both


def trained(model: Callable[[], Any], loss: Callable[..., Any], *inputs: Any) -> DeviceProgram:
    """Loss and gradients of a PyTorch model, captured and lowered."""
    import torch

    from stablecast import capture_torch

    def step(module: Any, *given: Any) -> Any:
        value = loss(module, *given)
        return value, *torch.autograd.grad(value, list(module.parameters()))

    workload = capture_torch(model, step, inputs, device="cpu")
    return lower(read(workload.modules[0].data, "step"), FLASH)


def tokens() -> Any:
    return pytest.importorskip("torch").zeros(BATCH, SEQ, dtype=int)


def labelled(model: Any, words: Any) -> Any:
    return model(input_ids=words, labels=words).loss


@pytest.mark.slow
def test_gpt2() -> None:
    """Two layers; what is left are 3 times 4 products of each layer and 3 of the logits."""
    words, transformers = tokens(), pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=SEQ,
        n_embd=WIDTH,
        n_layer=2,
        n_head=HEADS,
        attn_implementation="eager",
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    program = trained(lambda: transformers.GPT2LMHeadModel(config), labelled, words)
    assert attention(program) == [("fwd", 1)] * 2 + [("bwd", 1)] * 2
    assert sum(row.klass == KernelClass.MATMUL for row in kernels_of(program)) == 3 * (2 * 4 + 1)


@pytest.mark.slow
def test_t5() -> None:
    """A bias of their own, whose gradient sums over layers: two in the encoder, two pairs in the decoder."""
    words, transformers = tokens(), pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=D,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=HEADS,
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    program = trained(lambda: transformers.T5ForConditionalGeneration(config), labelled, words)
    forward = [("fwd", causal) for causal in (0, 0, 1, 0, 1, 0)]
    found = attention(program)
    assert found[:6] == forward
    assert sorted(found[6:]) == sorted(("bwd", causal) for _, causal in forward)


@pytest.mark.parametrize("causal", [False, True])
def test_math_decomposition_of_torch(causal: bool) -> None:
    torch = pytest.importorskip("torch")

    def loss(projection: Any, x: Any) -> Any:
        q, k, v = projection(x).view(BATCH, SEQ, 3, HEADS, D).permute(2, 0, 3, 1, 4)
        return torch.ops.aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, causal)[0].sum()

    program = trained(lambda: torch.nn.Linear(WIDTH, 3 * WIDTH), loss, torch.zeros(BATCH, SEQ, WIDTH))
    assert attention(program) == [("fwd", int(causal)), ("bwd", int(causal))]
    assert sum(row.klass == KernelClass.MATMUL for row in kernels_of(program)) == 2
