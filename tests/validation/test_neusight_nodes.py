"""NeuSight's graph nodes as the kernels that PyTorch starts, by hand."""

from dataclasses import replace

from stablecast.backends.catalogue import Catalogue
from stablecast.ir.kernels import KernelClass
from stablecast.validation.suites.neusight_nodes import (
    Node,
    backward_kernels,
    compiled,
    forward_kernels,
    without_idle,
)

DEVICE = Catalogue().device("a100-pcie-40gb")
SCORES = (2, 4, 128, 128)
NBYTES = 4 * 2 * 4 * 128 * 128


def _node(name: str, op: str, part: tuple[str, tuple[int, ...]], *inputs: tuple[int, ...], reads: str = "") -> Node:
    backward = (part,)
    return Node(name, op, (part,), backward, (), inputs, SCORES, tuple(reads.split()))


def test_operands_are_read_in_their_own_size() -> None:
    """A division by a scalar reads one operand, and its gradient is one kernel."""
    scaled = _node("truediv", "VECdiv", ("VECdiv", (1024, 128)), SCORES, (1,))
    (row,) = forward_kernels(DEVICE, scaled)
    assert (row.bytes_read, row.bytes_written, row.inputs) == (NBYTES + 4, NBYTES, 1)
    assert [row.inputs for row in backward_kernels(DEVICE, scaled)] == [1]
    both = _node("mul", "VECmul", ("VECmul", (1024, 128)), SCORES, SCORES)
    assert [row.bytes_read for row in backward_kernels(DEVICE, both)] == [2 * NBYTES, 2 * NBYTES]


def test_an_addition_passes_its_gradient_and_readers_are_summed() -> None:
    added = _node("add", "VECadd", ("VECadd", (1024, 128)), SCORES, SCORES, reads="ln size q k")
    assert [row.bytes_read for row in backward_kernels(DEVICE, added)] == [2 * NBYTES] * 2


def test_keys_are_copied_by_strides() -> None:
    """Of the two operands of scores the keys lie with their width innermost; each load fetches 32 bytes for 4."""
    heads, keys = (2, 4, 128, 64), (2, 4, 64, 128)
    product = _node("matmul", "BMM", ("BMM", (8, 128, 64, 128)), heads, keys)
    rows = forward_kernels(DEVICE, product)
    assert [row.klass for row in rows] == [KernelClass.MATMUL, KernelClass.COPY, KernelClass.COPY]
    assert rows[2].bytes_read == 8 * rows[1].bytes_read


def test_inductor_joins_pointwise_nodes_with_what_reads_them() -> None:
    """Scaling and masking become part of softmax through a cast that does nothing; a sum that others read is written by
    the norm that it joins."""
    scaled = _node("truediv", "fused", ("VECdiv", (1024, 128)), SCORES, reads="to")
    cast = Node("to", "fused", (), (), (), (SCORES,), SCORES, ("where",))
    masked = _node("where", "where", ("MEM", (SCORES, SCORES)), (1, 1, 128, 128), SCORES, reads="softmax")
    softmax = _node("softmax", "fused", ("VECsoftmax", (1024, 128)), SCORES, reads="matmul")
    found = compiled([scaled, cast, masked, softmax])
    rows = [row for node in found for row in forward_kernels(DEVICE, node)]
    assert [(row.bytes_read, row.bytes_written) for row in rows] == [(NBYTES + 4 * 128 * 128, NBYTES)]

    added = _node("add", "fused", ("VECadd", (1024, 128)), SCORES, SCORES, reads="ln again")
    norm = _node("ln", "VECln", ("VECln", (1024, 128)), SCORES)
    again = _node("again", "Linear", ("Linear", (1024, 128, 128)), SCORES)
    rows = [row for node in compiled([added, norm, again]) for row in forward_kernels(DEVICE, node)]
    assert [(row.bytes_read, row.bytes_written) for row in rows[:1]] == [(2 * NBYTES, 2 * NBYTES)]


def test_the_gradient_of_a_maximum_is_five_kernels() -> None:
    """PyTorch: `where(self == other, grad / 2, grad).masked_fill_(self < other, 0)`; 5, 8, 13, 5 and 9 bytes each."""
    clamped = Node("max_1", "misc", (), (), (), ((2, 4, 128, 128), (1,)), SCORES, ("view",))
    rows = backward_kernels(DEVICE, clamped)
    assert [row.bytes_read + row.bytes_written for row in rows] == [NBYTES / 4 * each for each in (5, 8, 13, 5, 9)]
    largest = Node("max_1", "misc", (), (), (), ((2, 4, 128, 128, 8),), SCORES, ("view",))
    assert not backward_kernels(DEVICE, largest)


def test_what_lies_contiguous_is_not_copied() -> None:
    record = {"Name": "contiguous_3", "OpName": "contiguous", "Next": "[]", "AccOps": "[]", "OutputShape": str(SCORES)}
    record |= {"InputShapes": f"[{SCORES}]", "FwOps": f"[['MEM', ({SCORES}, {SCORES})]]", "BwOps": "[]"}
    assert not forward_kernels(DEVICE, Node.of(record | {"Prev": "['lm_head']"}))
    (row,) = forward_kernels(DEVICE, Node.of(record | {"Prev": "['transpose_2']"}))
    assert row.bytes_written == NBYTES


def test_probabilities_that_never_drop_out_cost_nothing() -> None:
    part = ("MEM", (SCORES, SCORES))
    weights = _node("dropout", "dropout", part, SCORES)
    hidden = replace(_node("dropout_1", "dropout", part, (2, 128, 512)), output=(2, 128, 512))
    for given, found in ((0.0, 0), (0.1, 1)):
        settled = [without_idle(node, {"attention_dropout": given}) for node in (weights, hidden)]
        assert [len(forward_kernels(DEVICE, node)) for node in settled] == [found, 1]
        assert [len(backward_kernels(DEVICE, node)) for node in settled] == [found, 1]


def test_the_gradient_of_softmax_takes_no_exponentials() -> None:
    """`softmax_backward`: the gradient and the result are read, and nothing is raised to a power again."""
    softmax = _node("softmax", "VECsoftmax", ("VECsoftmax", (1024, 128)), SCORES)
    (row,) = backward_kernels(DEVICE, softmax)
    assert (row.bytes_read, row.bytes_written, row.transcendentals) == (2 * NBYTES, NBYTES, 0)
