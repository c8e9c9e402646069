"""The step as streams: kernels, collectives and copies side by side, pipelines of roles, and where the time goes."""

from stablecast.backends.schedule.meeting import RoleInput
from stablecast.backends.schedule.pipeline import (
    PIPELINE_SCHEDULES,
    PipelineTimeline,
    StageCost,
    Task,
    pipeline,
)
from stablecast.backends.schedule.scheduled import schedule, schedule_roles
from stablecast.backends.schedule.settings import Contention, ScheduleSettings
from stablecast.backends.schedule.timeline import CollectiveRuns, KernelRuns, Slice, Timeline

__all__ = [
    "PIPELINE_SCHEDULES",
    "CollectiveRuns",
    "Contention",
    "KernelRuns",
    "PipelineTimeline",
    "RoleInput",
    "ScheduleSettings",
    "Slice",
    "StageCost",
    "Task",
    "Timeline",
    "pipeline",
    "schedule",
    "schedule_roles",
]
