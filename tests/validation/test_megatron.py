"""vTrain's layouts: layers add up, stages and micro-batches follow 1F1B, and the ranking counts what it says."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stablecast.backends.collectives import CollectiveModel
from stablecast.backends.registry import parse_choice
from stablecast.ir.device_program import Collective, Kernel
from stablecast.validation.suites import megatron
from stablecast.validation.suites.base import Data, examples_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[megatron.Megatron]:
    pytest.importorskip("torch", reason="torch is not installed")
    folder = examples_folder()
    if folder is None:
        pytest.skip("the example programs are not at hand")
    data = Data(Path(), parse_choice("analytical"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STABLECAST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield megatron.Megatron(data, folder, megatron.TABLES[0])


def layout(dp: int = 1, pp: int = 1, batch: int = 4, tp: int = 1) -> megatron.Layout:
    return megatron.Layout(megatron.Shape(256, 4, 128, 1, tp), 4, batch, dp, pp, dp * pp * tp)


def test_a_third_layer_costs_what_the_second_did(model: megatron.Megatron) -> None:
    shape = layout().shape
    totals = [model._node_costs(model.program(shape, layers, "micro_step"), 1).sum(axis=0) for layers in (1, 2, 3)]
    assert totals[2] - totals[1] == pytest.approx(totals[1] - totals[0])


def test_stages_and_micro_batches(model: megatron.Megatron) -> None:
    parts = model.parts(layout().shape)
    assert (parts.layer > 0).all()
    assert (parts.embed > 0).all()
    assert (parts.head > 0).all()
    whole = 4 * parts.layer + parts.embed + parts.head
    update = model._update(layout(), 4)
    assert model.step(layout()) == pytest.approx(4 * whole + update)
    last = 2 * parts.layer + parts.head
    hop = 2 * model._hop(layout(pp=2))
    assert model.step(layout(pp=2)) == pytest.approx(whole + 3 * last + hop + model._update(layout(), 2))


def test_more_devices_sum_gradients(model: megatron.Megatron) -> None:
    alone, together = model.step(layout()), model.step(layout(dp=2, batch=8))
    assert together[0] > alone[0]
    assert together == pytest.approx(alone + model._gradients(layout(dp=2), 4))


def test_dispatch_comes_before_a_kernel_that_is_timed_alone_and_else_hides_short_ones(
    model: megatron.Megatron,
) -> None:
    program = model.program(layout().shape, 1, "micro_step")
    together = megatron.Megatron(model.data, model.folder, megatron.TABLES[1])
    one_by_one, hidden = model._node_costs(program, 1), together._node_costs(program, 1)
    assert (one_by_one > megatron.HOST_S).all()
    assert (hidden >= megatron.HOST_S).all()
    assert (hidden < one_by_one).all()


def test_a_collective_is_dispatched_for_longer(model: megatron.Megatron) -> None:
    shape = layout(tp=2).shape
    program = model.program(shape, 1, "micro_step")
    costs = model._node_costs(program, 2)[:, 0]
    collectives = CollectiveModel(model.system(2))
    alone = [collectives.estimate(node).time_s if isinstance(node, Collective) else 0.0 for node in program.body]
    inside = [place for place, one in enumerate(alone) if one]
    assert len(inside) == 9, "embedding, twice ahead and twice back in the layer, three in the loss, one before it"
    assert costs[inside] == pytest.approx(np.array(alone)[inside] + megatron.HOST_COLLECTIVE_S)


def test_attention_reads_its_operands_where_they_lie_and_products_add_to_gradients(model: megatron.Megatron) -> None:
    """As in Megatron: heads are brought together by one copy; a weight's gradient is no kernel besides its product."""
    program = model.program(layout().shape, 1, "micro_step")
    inside = [node for node in program.body if isinstance(node, Kernel) and "/layers/" in node.scope]
    names = [node.scope.rsplit("/", 1)[-1] for node in inside]
    assert names.count("aten.clone") == 1
    assert names.count("aten.baddbmm") == 1
    gradients = [node for node in inside if node.scope.startswith("backward") and node.scope.endswith("aten.addmm")]
    assert len(gradients) == 4, "query, key and value in one, output, up, down"
    hidden = layout().shape.hidden
    added = [program.table.rows[node.row].elems for node in inside if node.scope.endswith("aten.add")]
    assert max(added) == layout().shape.seq * hidden < 3 * hidden**2, "only activations and vectors are added"


def test_layers_that_run_again_cost_more(model: megatron.Megatron) -> None:
    again = megatron.Megatron(model.data, model.folder, megatron.TABLES[1])
    kept, repeated = (m.program(layout().shape, 1, "micro_step") for m in (model, again))
    assert sum(kept.table.count) < sum(repeated.table.count)


def test_a_second_run_takes_the_programs_from_disk(model: megatron.Megatron, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model.program(layout(tp=2).shape, 1, "micro_step")
    monkeypatch.setattr(megatron.Megatron, "_capture", None)
    again = megatron.Megatron(model.data, model.folder, megatron.TABLES[0])
    assert again.program(layout(tp=2).shape, 1, "micro_step").table.rows == first.table.rows


def test_hits_by_hand() -> None:
    measured = np.array([10.0, 10.4, 20.0, 7.0, 9.0])
    groups = [[0, 1, 2], [3, 4]]
    assert megatron.hits(groups, measured, np.array([2.0, 1.0, 3.0, 1.0, 2.0])) == pytest.approx(
        (1.0, (2 / 3 + 1 / 2) / 2)
    )
    assert megatron.hits(groups, measured, np.array([2.0, 3.0, 1.0, 1.0, 2.0]))[0] == 0.5


def test_ranking_counts_hits_and_chance() -> None:
    names = ("hidden", "layers", "heads", "seq_len", "gpus", "global_batch")
    records = [dict.fromkeys(names, "1") | {"step_ms": str(ms)} for ms in (100, 104, *range(200, 206))]
    right, wrong = np.arange(8.0), np.arange(8.0)[::-1]
    assert "in 100% of 1 groups" in megatron.ranking("x", records, right.tolist())
    assert "a random one in 25%" in megatron.ranking("x", records, right.tolist())
    assert "in 0% of 1 groups" in megatron.ranking("x", records, wrong.tolist())
    assert "no group" in megatron.ranking("x", records[:3], [1.0, 2.0, 3.0])
