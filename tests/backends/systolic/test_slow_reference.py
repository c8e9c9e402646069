"""The event-driven model against a simulator written the slow way: every line, every address, sets for buffers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablecast.backends.systolic import DATAFLOWS, Dataflow, Layer, SramBanks, SystolicConfig, evaluate, shared_ring

Matrix = list[list[int]]


def _im2col(layer: Layer) -> Matrix:
    rows: Matrix = []
    for pixel in range(layer.m):
        top, left = pixel // layer.out_w * layer.stride_h, pixel % layer.out_w * layer.stride_w
        row: list[int] = []
        for down in range(layer.filter_h):
            for right in range(layer.filter_w):
                inside = top + down < layer.ifmap_h and left + right < layer.ifmap_w
                base = ((top + down) * layer.ifmap_w + left + right) * layer.channels
                row += [base + channel if inside else -1 for channel in range(layer.channels)]
        rows.append(row)
    return rows


def _transposed(matrix: Matrix) -> Matrix:
    return [list(row) for row in zip(*matrix, strict=True)]


def _skewed(block: Matrix, width: int, before: int, lines: int) -> Matrix:
    out = [[-1] * width for _ in range(lines)]
    for t, row in enumerate(block):
        for column, address in enumerate(row):
            out[before + t + column][column] = address
    return out


def _plain(block: Matrix, width: int, before: int, lines: int) -> Matrix:
    out = [[-1] * width for _ in range(lines)]
    for t, row in enumerate(block):
        out[before + t][: len(row)] = row
    return out


def _columns(matrix: Matrix, at: int, size: int) -> Matrix:
    return [row[at : at + size] for row in matrix]


def _diagonals(blocks: list[Matrix], width: int) -> list[int]:
    stack = [row + [-1] * (width - len(row)) for block in blocks for row in block]
    order: list[int] = []
    for diagonal in range(len(stack) + width - 1):
        order += [stack[diagonal - c][c] for c in range(width) if 0 <= diagonal - c < len(stack)]
    return order


@dataclass
class _Demand:
    """Lines of ifmap, filter and ofmap, and the two prefetch orders with blanks."""

    ifmap: Matrix = field(default_factory=list[list[int]])
    filters: Matrix = field(default_factory=list[list[int]])
    ofmap: Matrix = field(default_factory=list[list[int]])
    ifmap_order: list[int] = field(default_factory=list[int])
    filter_order: list[int] = field(default_factory=list[int])


def _demand(layer: Layer, dataflow: Dataflow, rows: int, cols: int) -> _Demand:
    ifmap = _im2col(layer)
    filters = [[f * layer.k + k for f in range(layer.n)] for k in range(layer.k)]
    outputs = [[p * layer.n + f for f in range(layer.n)] for p in range(layer.m)]
    demand = _Demand()
    if dataflow == "os":
        lines = layer.k + rows + cols - 2
        streamed = _transposed(ifmap)
        left, top = range(0, layer.m, rows), range(0, layer.n, cols)
        for c in top:
            for r in left:
                demand.ifmap += _skewed(_columns(streamed, r, rows), rows, 0, lines)
                demand.filters += _skewed(_columns(filters, c, cols), cols, 0, lines)
                block = _columns(outputs[r : r + rows], c, cols)[::-1]
                demand.ofmap += _skewed(block, cols, layer.k - 1 + rows - len(block), lines)
        demand.ifmap_order = _diagonals([_columns(streamed, r, rows) for r in left], rows)
        demand.filter_order = _diagonals([_columns(filters, c, cols) for c in top], cols)
        return demand
    if dataflow == "ws":
        streamed, held, results = ifmap, filters, outputs
    else:
        streamed, held, results = _transposed(filters), _transposed(ifmap), _transposed(outputs)
    lines = len(streamed) + 2 * rows + cols - 2
    stream_lines: Matrix = []
    held_lines: Matrix = []
    tall, wide = range(0, layer.k, rows), range(0, len(held[0]), cols)
    for c in wide:
        for r in tall:
            stream_lines += _skewed(_columns(streamed, r, rows), rows, rows, lines)
            block = _columns(held[r : r + rows], c, cols)[::-1]
            held_lines += _plain(block, cols, rows - len(block), lines)
            demand.ofmap += _skewed(_columns(results, c, cols), cols, 2 * rows - 1, lines)
    stream_order = _diagonals([_columns(streamed, r, rows) for r in tall], rows)
    held_order = [row[i] if i < len(row) else -1 for c in wide for row in _columns(held, c, cols) for i in range(cols)]
    if dataflow == "ws":
        demand.ifmap, demand.filters = stream_lines, held_lines
        demand.ifmap_order, demand.filter_order = stream_order, held_order
    else:
        demand.ifmap, demand.filters = held_lines, stream_lines
        demand.ifmap_order, demand.filter_order = held_order, stream_order
    return demand


class _Window:
    """A read buffer under USER bandwidth: sets of addresses on a ring."""

    def __init__(self, order: list[int], total: int, bandwidth: int) -> None:
        per_line = -(-total // 100)
        self.bandwidth = bandwidth
        self.active_words, self.spare_words = -(-total // 2), total // 2
        self.ring: list[set[int]] = [set()]
        count = 0
        for address in order:
            if address >= 0:
                self.ring[-1].add(address)
                count += 1
                if count == per_line:
                    self.ring.append(set())
                    count = 0
        self.held = min(-(-self.active_words // per_line), len(self.ring))
        self.step = min(-(-self.spare_words // per_line), len(self.ring) - self.held)
        self.first_rows = min(-(-self.active_words // bandwidth), -(-len(order) // bandwidth))
        self.start, self.last, self.shifts = 0, -1, 0

    def _hit(self, address: int) -> bool:
        return any(address in self.ring[(self.start + i) % len(self.ring)] for i in range(self.held))

    def serve(self, line: list[int], cycle: int) -> int:
        ready = cycle + 1
        rows = -(-self.spare_words // self.bandwidth)
        for address in line:
            while address >= 0 and not self._hit(address):
                self.start += self.step
                self.shifts += 1
                self.last += rows + 1
                late = self.last - ready
                ready += late + max(0, late)
        return ready

    def dram(self) -> tuple[int, int, int]:
        rows = self.first_rows + -(-self.spare_words // self.bandwidth) * self.shifts
        return -self.first_rows, max(-1, self.last), rows * self.bandwidth


class _Counted:
    """A read buffer under estimated bandwidth: emptied when half of it is full."""

    def __init__(self, total: int) -> None:
        self.per_set = total // 100
        self.held: set[int] = set()
        self.first, self.wipe, self.words = -1, -1, 0

    def serve(self, line: list[int], cycle: int) -> int:
        for address in line:
            if address >= 0 and self.first < 0:
                self.first = cycle
            if address >= 0 and address not in self.held:
                self.held.add(address)
                self.words += 1
                if len(self.held) == 50 * self.per_set:
                    self.held, self.wipe = set(), cycle
        return cycle + 1

    def dram(self) -> tuple[int, int, int]:
        if self.wipe < 0:
            sets = ceil(self.words / self.per_set)
            return -ceil(sets * self.per_set / 10), -1, self.words
        return self.first - ceil(50 * self.per_set / 10), self.wipe + 1, self.words


class _Output:
    """The output buffer, word by word."""

    def __init__(self, total: int, bandwidth: int) -> None:
        self.total, self.bandwidth, self.free = total, bandwidth, total
        self.spare = total // 2
        self.rows: list[int] = []
        self.open, self.end, self.writes = 0, 0, 0
        self.span: list[int] = []

    def _drain(self, cycle: int) -> None:
        if self.open:
            self.rows.append(self.open)
            self.open = 0
        block = self.rows[: -(-self.spare // self.bandwidth)]
        del self.rows[: len(block)]
        words = (len(block) - 1) * self.bandwidth + block[-1]
        self.free += words
        self.writes += words
        self.end = cycle + len(block) - 1
        self.span += [cycle, self.end]

    def serve(self, line: list[int], cycle: int) -> int:
        for _ in filter(lambda address: address >= 0, line):
            self.open += 1
            self.free -= 1
            if self.open == self.bandwidth:
                self.rows.append(self.open)
                self.open = 0
            if cycle < self.end:
                if self.free <= 0:
                    cycle = self.end
            elif self.free < self.total - self.spare:
                self._drain(cycle)
        return cycle

    def finish(self, cycle: int) -> None:
        while self.rows or self.open:
            self._drain(cycle)
            cycle = self.end + 1


def _first_last(lines: Matrix) -> Iterator[int]:
    used = [at for at, line in enumerate(lines) if max(line) >= 0]
    yield used[0]
    yield used[-1]


def _slow(layer: Layer, config: SystolicConfig) -> dict[str, object]:
    demand = _demand(layer, config.dataflow, config.rows, config.cols)
    user = config.mode == "USER"
    ifmap: _Window | _Counted
    filters: _Window | _Counted
    if user:
        ifmap = _Window(demand.ifmap_order, 1024 * config.ifmap_kb, config.ifmap.bandwidth)
        filters = _Window(demand.filter_order, 1024 * config.filter_kb, config.filter.bandwidth)
    else:
        ifmap, filters = _Counted(1024 * config.ifmap_kb), _Counted(1024 * config.filter_kb)
    ofmap = _Output(1024 * config.ofmap_kb, config.bandwidth if user else config.cols)
    stall = 0
    served: list[tuple[int, int, int]] = []
    for at, lines in enumerate(zip(demand.ifmap, demand.filters, demand.ofmap, strict=True)):
        cycle = at + stall
        buffers: tuple[Callable[[list[int], int], int], ...] = (ifmap.serve, filters.serve, ofmap.serve)
        ready = [serve(line, cycle) for serve, line in zip(buffers, lines, strict=True)]
        served.append((ready[0], ready[1], ready[2]))
        stall = max(ready[0], ready[1], ready[2] + 1) - at - 1
    total = served[-1][2]
    ofmap.finish(total)
    spans = [
        tuple(served[at][index] for at in _first_last(lines))
        for index, lines in enumerate((demand.ifmap, demand.filters, demand.ofmap))
    ]
    return {
        "total": total,
        "stalls": stall,
        "sram": spans,
        "dram": [ifmap.dram(), filters.dram(), (ofmap.span[0], max(ofmap.span), ofmap.writes)],
    }


def _fast(layer: Layer, config: SystolicConfig) -> dict[str, object]:
    report = evaluate(layer, config, "scalesim-3.0")
    sram = (report.sram_ifmap, report.sram_filter, report.sram_ofmap)
    dram = (report.dram_ifmap, report.dram_filter, report.dram_ofmap)
    return {
        "total": report.total_cycles,
        "stalls": report.stall_cycles,
        "sram": [(stream.start, stream.stop) for stream in sram],
        "dram": [(stream.start, stream.stop, stream.words) for stream in dram],
    }


@st.composite
def _convolutions(draw: st.DrawFn) -> Layer:
    filter_h, filter_w = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    height, width = filter_h + draw(st.integers(0, 7)), filter_w + draw(st.integers(0, 7))
    stride_h, stride_w = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    channels, filters = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    return Layer("conv", height, width, filter_h, filter_w, channels, filters, stride_h, stride_w)


_PRODUCTS = st.builds(Layer.gemm, st.just("gemm"), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
_SIZES = st.integers(1, 13)
_CONFIGS = st.builds(
    SystolicConfig,
    rows=_SIZES,
    cols=st.integers(2, 13),
    ifmap_kb=st.just(1),
    filter_kb=st.just(1),
    ofmap_kb=st.just(1),
    dataflow=st.sampled_from(DATAFLOWS),
    mode=st.sampled_from(("CALC", "USER")),
    bandwidths=st.tuples(st.integers(1, 20)),
    ifmap=st.builds(SramBanks, bandwidth=st.integers(1, 20)),
    filter=st.builds(SramBanks, bandwidth=st.integers(1, 20)),
)


@settings(max_examples=25, deadline=None)
@given(layer=st.one_of(_convolutions(), _PRODUCTS), config=_CONFIGS)
def test_equal_to_stepping_every_line(layer: Layer, config: SystolicConfig) -> None:
    assert _fast(layer, config) == _slow(layer, config)


def test_long_rings_are_renumbered_and_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("c", 14, 13, 3, 3, 10, 9)
    config = SystolicConfig(4, 5, 1, 1, 1, "ws", "USER", bandwidths=(2,), ifmap=SramBanks(3), filter=SramBanks(2))
    whole = _fast(layer, config)
    monkeypatch.setattr(shared_ring, "_RENUMBER_AT", 10)
    monkeypatch.setattr(shared_ring, "_KEPT_WORDS", 100)
    monkeypatch.setattr(shared_ring, "_CHUNK_WORDS", 64)
    assert _fast(layer, config) == whole


@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize("layer", [Layer.gemm("g", 60, 50, 40), Layer("c", 14, 13, 3, 3, 10, 9)], ids=lambda x: x.kind)
def test_stalls_and_refetches_are_equal(layer: Layer, dataflow: Dataflow) -> None:
    config = SystolicConfig(4, 5, 1, 1, 1, dataflow, "USER", bandwidths=(2,), ifmap=SramBanks(3), filter=SramBanks(2))
    slow = _slow(layer, config)
    assert slow["stalls"] != 0
    assert _fast(layer, config) == slow
