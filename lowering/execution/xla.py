"""XLA's fusion as passes; the rules are those of `lowering.fusion` and `lowering.multi_output`."""

from stablecast.lowering.execution.plan import Plan, plan_pass
from stablecast.lowering.fusion import XLA_GPU_RULES, XLA_RULES, XLA_TPU_RULES, Grouping

GPU_PLATFORMS = ("cuda", "rocm")
GROUP, INTO_CONSUMERS, SIBLINGS, OUTPUTS = "xla-fusion", "xla-multi-output", "xla-siblings", "xla-output-fusion"


@plan_pass(GROUP, "producers into consumers where that moves fewer bytes; products with their epilogues")
def group(plan: Plan) -> None:
    rules = XLA_GPU_RULES if on_gpu(plan) else XLA_TPU_RULES if on_tpu(plan) else XLA_RULES
    plan.groups = Grouping(plan.graph, plan.groups, plan.claimed, rules).run()


def on_gpu(plan: Plan) -> bool:
    """Whether the rules of XLA:GPU hold."""
    return plan.target.platform in GPU_PLATFORMS


def on_tpu(plan: Plan) -> bool:
    """Whether the rules of XLA:TPU hold."""
    return plan.target.platform == "tpu"


@plan_pass(INTO_CONSUMERS, "elementwise kernels whose result is kept join their first consumer of the same extent")
def into_consumers(plan: Plan) -> None:
    plan.merger().into_consumers()


@plan_pass(SIBLINGS, "kernels of the same extent that read the same tensor become one")
def siblings(plan: Plan) -> None:
    plan.merger().siblings()


@plan_pass(OUTPUTS, "on TPUs a product takes in the first kernel that walks over its result")
def outputs(plan: Plan) -> None:
    if on_tpu(plan):
        plan.merger().into_products()
