"""Items of a step, by the shapes of its arguments."""

from stablecast.ir.dtypes import dtype
from stablecast.ir.program import Argument, ArgumentKind
from stablecast.ir.throughput import Throughput, throughput_of
from stablecast.ir.types import TensorType


def argument(name: str, element: str, *shape: int, state: bool = False, kind: str = "unknown") -> Argument:
    return Argument(
        name, TensorType(shape, dtype(element)), kind=ArgumentKind(kind), aliases_output=0 if state else None
    )


def test_tokens_images_samples() -> None:
    state = argument("w", "f32", 64, 64, state=True)
    tokens = argument("tokens", "i32", 8, 1024)
    images, labels = argument("images", "bf16", 32, 224, 224, 3), argument("labels", "i32", 32)
    assert throughput_of([state, tokens]) == Throughput("tokens", 8192)
    assert throughput_of([state, images, labels]) == Throughput("images", 32)
    assert throughput_of([state, images, labels], replicas=4) == Throughput("images", 128)
    assert throughput_of([state, argument("x", "f32", 16, 100)]) == Throughput("samples", 16)
    indices = argument("indices", "i32", 26, 8192)
    assert throughput_of([state, argument("dense", "f32", 8192, 13), indices]) == Throughput("samples", 8192)


def test_what_is_not_known_to_be_a_batch_gives_nothing() -> None:
    assert throughput_of([argument("w", "f32", 64, 64), argument("x", "i32", 8, 8)]) is None
    assert throughput_of([argument("x", "f32", 8, 8, kind="batch")]) == Throughput("samples", 8)
