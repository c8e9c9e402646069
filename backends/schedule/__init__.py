"""The step as streams: kernels, collectives and copies side by side, pipelines of roles, and where the time goes."""

from stablecast.backends.schedule.pipeline import (
    PIPELINE_SCHEDULES,
    PipelineTimeline,
    StageCost,
    Task,
    pipeline,
)
from stablecast.backends.schedule.scheduled import (
    RoleInput,
    ScheduledTimeline,
    Slice,
    schedule,
    schedule_roles,
)
from stablecast.backends.schedule.settings import Contention, ScheduleSettings

__all__ = [
    "PIPELINE_SCHEDULES",
    "Contention",
    "PipelineTimeline",
    "RoleInput",
    "ScheduleSettings",
    "ScheduledTimeline",
    "Slice",
    "StageCost",
    "Task",
    "pipeline",
    "schedule",
    "schedule_roles",
]
