"""Every verb of the planner's API, once: server, schema, command line and tests read this table."""

from typing import Any, Final

from stageloom.planner.api.route import AnswerForm, Route
from stageloom.planner.schema import (
    access,
    device,
    explanation,
    job,
    model,
    plan,
    policy,
    prediction,
    replan,
    rollout,
    scheduler,
    service,
    telemetry,
    training,
    trial,
    webhook,
)
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.base import Done, Page

# -- the planner itself, and devices as they run ----------------------------------------------------------

STATUS: Final = Route(
    "status",
    "GET",
    "/v1/status",
    service.StatusRequest,
    service.StatusReply,
    Role.VIEWER,
    "Is the planner alive, and how are its parts?",
)
CLOCK_TRUST: Final = Route(
    "clock.trust",
    "POST",
    "/v1/clock/trust",
    service.ClockTrustRequest,
    Done,
    Role.ADMIN,
    "Say that the planner's clock is right.",
)
WATCH: Final = Route(
    "watch",
    "GET",
    "/v1/watch",
    service.WatchRequest,
    service.WatchReply,
    Role.VIEWER,
    "Devices and their models' rates, once.",
)
WATCH_EVENTS: Final = Route(
    "watch.events",
    "GET",
    "/v1/watch/events",
    service.WatchEventsRequest,
    service.WatchReply,
    Role.VIEWER,
    "Devices and their models' rates, again and again.",
    form=AnswerForm.EVENTS,
)
BACKUP: Final = Route(
    "backup",
    "GET",
    "/v1/backup",
    service.BackupRequest,
    bytes,
    Role.ADMIN,
    "Database, artifacts and keys of one moment, as a tar file.",
    form=AnswerForm.DOWNLOAD,
    secret=True,
    offline=True,
)
SETTINGS: Final = Route(
    "settings",
    "GET",
    "/v1/settings",
    service.SettingsRequest,
    service.SettingsReply,
    Role.ADMIN,
    "The settings in force, and what each is for.",
)

# -- devices ----------------------------------------------------------------------------------------------

DEVICE_LIST: Final = Route(
    "device.list",
    "GET",
    "/v1/devices",
    device.DeviceListRequest,
    Page[device.DeviceInfo],
    Role.VIEWER,
    "Enrolled devices, by name.",
    offline=True,
)
DEVICE_SHOW: Final = Route(
    "device.show",
    "GET",
    "/v1/devices/{device}",
    device.DeviceShowRequest,
    device.DeviceShowReply,
    Role.VIEWER,
    "One device with its latest generations.",
    offline=True,
)
DEVICE_TOKEN: Final = Route(
    "device.token",
    "POST",
    "/v1/join-tokens",
    device.DeviceTokenRequest,
    device.DeviceTokenReply,
    Role.ADMIN,
    "A one-time token with which one device may enrol.",
    creates=True,
    secret=True,
)
DEVICE_REVOKE: Final = Route(
    "device.revoke",
    "POST",
    "/v1/devices/{device}/revoke",
    device.DeviceRevokeRequest,
    Done,
    Role.ADMIN,
    "Take a device's key away.",
)
DEVICE_RELEASE: Final = Route(
    "device.release",
    "POST",
    "/v1/devices/{device}/release",
    device.DeviceReleaseRequest,
    Done,
    Role.ADMIN,
    "Let a quarantined device in again.",
)
DEVICE_LABEL: Final = Route(
    "device.label",
    "PATCH",
    "/v1/devices/{device}/labels",
    device.DeviceLabelRequest,
    device.DeviceLabels,
    Role.OPERATOR,
    "Give labels to a device, or take them away.",
)
DEVICE_PROFILE: Final = Route(
    "device.profile",
    "POST",
    "/v1/devices/{device}/profiles",
    device.DeviceProfileRequest,
    device.DeviceProfileReply,
    Role.OPERATOR,
    "Have a device measure operators of models, or stages of a plan.",
    form=AnswerForm.JOB,
    creates=True,
)
REPLANNING_SHOW: Final = Route(
    "device.replanning",
    "GET",
    "/v1/devices/{device}/replanning",
    replan.ReplanningShowRequest,
    replan.Replanning,
    Role.VIEWER,
    "How a device is re-planned.",
    offline=True,
)
REPLANNING_CHANGE: Final = Route(
    "device.replan",
    "PATCH",
    "/v1/devices/{device}/replanning",
    replan.ReplanningChangeRequest,
    replan.Replanning,
    Role.OPERATOR,
    "Change how a device is re-planned.",
)
POLICY_ATTACH: Final = Route(
    "policy.attach",
    "PUT",
    "/v1/devices/{device}/policy",
    device.PolicyAttachRequest,
    plan.Pushed,
    Role.OPERATOR,
    "Send a learned policy to a device.",
)
DEVICE_TELEMETRY: Final = Route(
    "device.telemetry",
    "GET",
    "/v1/devices/{device}/telemetry",
    telemetry.DeviceTelemetryRequest,
    Page[telemetry.TelemetryItem],
    Role.VIEWER,
    "What a device measured, newest first.",
    offline=True,
)
DEVICE_BOOKS: Final = Route(
    "device.books",
    "GET",
    "/v1/devices/{device}/telemetry/books",
    telemetry.DeviceBooksRequest,
    service.TelemetryBooks,
    Role.VIEWER,
    "How many rows of telemetry a device produced, and what became of them.",
    offline=True,
)
TRIAL_COMPARE: Final = Route(
    "plan.compare",
    "GET",
    "/v1/devices/{device}/trial-comparison",
    trial.TrialCompareRequest,
    trial.TrialComparison,
    Role.VIEWER,
    "The two plans of a device's trial, side by side.",
    offline=True,
)

# -- models -----------------------------------------------------------------------------------------------

MODEL_LIST: Final = Route(
    "model.list",
    "GET",
    "/v1/models",
    model.ModelListRequest,
    Page[model.ModelInfo],
    Role.VIEWER,
    "Versions of models, by name.",
    offline=True,
)
MODEL_ADD: Final = Route(
    "model.add",
    "PUT",
    "/v1/models/{model}",
    model.ModelAddRequest,
    model.ModelAdded,
    Role.OPERATOR,
    "Give the planner a model that `stageloom model add` has imported.",
    form=AnswerForm.UPLOAD,
)
MODEL_SHOW: Final = Route(
    "model.show",
    "GET",
    "/v1/models/{model}",
    model.ModelShowRequest,
    model.ModelDetail,
    Role.VIEWER,
    "One version of a model (`NAME@VERSION`, else the newest), and where it runs.",
    offline=True,
)
MODEL_EXPORT: Final = Route(
    "model.export",
    "GET",
    "/v1/models/{model}/onnx",
    model.ModelExportRequest,
    bytes,
    Role.OPERATOR,
    "The normalised ONNX file of a version of a model, which plans are of.",
    form=AnswerForm.DOWNLOAD,
    offline=True,
)
MODEL_REMOVE: Final = Route(
    "model.remove",
    "DELETE",
    "/v1/models/{model}",
    model.ModelRemoveRequest,
    Done,
    Role.OPERATOR,
    "Forget a model, or `NAME@VERSION`, that nothing uses, or whatever uses it.",
)

# -- plans ------------------------------------------------------------------------------------------------

PLAN_LIST: Final = Route(
    "plan.list",
    "GET",
    "/v1/plans",
    plan.PlanListRequest,
    Page[plan.PlanInfo],
    Role.VIEWER,
    "Plans, by name.",
    offline=True,
)
PLAN_SHOW: Final = Route(
    "plan.show",
    "GET",
    "/v1/plans/{plan}",
    plan.PlanShowRequest,
    plan.PlanInfo,
    Role.VIEWER,
    "One plan, by its name or the beginning of its digest.",
    offline=True,
)
PLAN_EXPORT: Final = Route(
    "plan.export",
    "GET",
    "/v1/plans/{plan}/export",
    plan.PlanExportRequest,
    plan.PlanExport,
    Role.VIEWER,
    "A plan in a format of another tool.",
    offline=True,
)
PLAN_REQUEST: Final = Route(
    "plan.request",
    "GET",
    "/v1/plans/{plan}/request",
    plan.PlanRequestRequest,
    plan.PlanCreateRequest,
    Role.VIEWER,
    "The request that makes this plan again, as a plan file has it.",
    offline=True,
)
PLAN_CREATE: Final = Route(
    "plan.create",
    "POST",
    "/v1/plans",
    plan.PlanCreateRequest,
    plan.PlanReply,
    Role.OPERATOR,
    "Search a plan and keep it.",
    form=AnswerForm.JOB,
    creates=True,
)
PLAN_PUSH: Final = Route(
    "plan.push",
    "POST",
    "/v1/plans/{plan}/pushes",
    plan.PlanPushRequest,
    plan.PlanPushReply,
    Role.OPERATOR,
    "Make a plan what devices should run.",
    creates=True,
)
PLAN_HISTORY: Final = Route(
    "plan.history",
    "GET",
    "/v1/generations",
    plan.PlanHistoryRequest,
    Page[plan.HistoryEntry],
    Role.VIEWER,
    "What devices were to run, who decided it, how it ended; newest first.",
    offline=True,
)
PLAN_EXPLAIN: Final = Route(
    "plan.explain",
    "GET",
    "/v1/plans/{plan}/explanation",
    explanation.PlanExplainRequest,
    explanation.PlanExplanation,
    Role.VIEWER,
    "Why a plan is as it is: its schedules and costs, who decided, and what else there was.",
    offline=True,
)
PREDICTION_LIST: Final = Route(
    "prediction.list",
    "GET",
    "/v1/predictions",
    prediction.PredictionListRequest,
    Page[prediction.PredictionInfo],
    Role.VIEWER,
    "What the twin predicted, beside what was measured since; newest first.",
    offline=True,
)
REPLAN_LIST: Final = Route(
    "replan.list",
    "GET",
    "/v1/replans",
    replan.ReplanListRequest,
    Page[replan.ReplanInfo],
    Role.VIEWER,
    "Re-plans with their triggers, trials and outcomes; newest first.",
    offline=True,
)
REGIME_LIST: Final = Route(
    "replan.regimes",
    "GET",
    "/v1/devices/{device}/regimes",
    replan.RegimeListRequest,
    Page[replan.RegimeInfo],
    Role.VIEWER,
    "Under which arrivals which plan of a device won its trial; newest first.",
    offline=True,
)

# -- rollouts ---------------------------------------------------------------------------------------------

ROLLOUT_CREATE: Final = Route(
    "rollout.create",
    "POST",
    "/v1/rollouts",
    rollout.RolloutCreateRequest,
    rollout.RolloutInfo,
    Role.OPERATOR,
    "Bring a version of a model to devices in waves.",
    creates=True,
)
ROLLOUT_LIST: Final = Route(
    "rollout.list",
    "GET",
    "/v1/rollouts",
    rollout.RolloutListRequest,
    Page[rollout.RolloutInfo],
    Role.VIEWER,
    "Rollouts, newest first.",
    offline=True,
)
ROLLOUT_SHOW: Final = Route(
    "rollout.show",
    "GET",
    "/v1/rollouts/{rollout}",
    rollout.RolloutShowRequest,
    rollout.RolloutInfo,
    Role.VIEWER,
    "One rollout, and how many of its devices are how far.",
    offline=True,
)
ROLLOUT_DEVICES: Final = Route(
    "rollout.devices",
    "GET",
    "/v1/rollouts/{rollout}/devices",
    rollout.RolloutDevicesRequest,
    Page[rollout.RolloutDeviceInfo],
    Role.VIEWER,
    "The devices of a rollout, by wave and name.",
    offline=True,
)
ROLLOUT_PAUSE: Final = Route(
    "rollout.pause",
    "POST",
    "/v1/rollouts/{rollout}/pause",
    rollout.RolloutPauseRequest,
    rollout.RolloutInfo,
    Role.OPERATOR,
    "Ask no further device.",
)
ROLLOUT_RESUME: Final = Route(
    "rollout.resume",
    "POST",
    "/v1/rollouts/{rollout}/resume",
    rollout.RolloutResumeRequest,
    rollout.RolloutInfo,
    Role.OPERATOR,
    "Go on with a rollout that is paused.",
)
ROLLOUT_ABORT: Final = Route(
    "rollout.abort",
    "POST",
    "/v1/rollouts/{rollout}/abort",
    rollout.RolloutAbortRequest,
    rollout.RolloutInfo,
    Role.OPERATOR,
    "End a rollout; with `rollback` its devices get their old plans back.",
)

# -- schedulers -------------------------------------------------------------------------------------------

SCHEDULER_LIST: Final = Route(
    "scheduler.list",
    "GET",
    "/v1/schedulers",
    scheduler.SchedulerListRequest,
    Page[scheduler.SchedulerInfo],
    Role.VIEWER,
    "What a plan's request takes as scheduler and policy.",
    offline=True,
)
SCHEDULER_COMPARE: Final = Route(
    "scheduler.compare",
    "POST",
    "/v1/scheduler-comparisons",
    scheduler.SchedulerCompareRequest,
    scheduler.SchedulerCompareReply,
    Role.OPERATOR,
    "Search with each scheduler on the same models.",
    form=AnswerForm.JOB,
    offline=True,
)

# -- predictions ------------------------------------------------------------------------------------------

PREDICTION_CREATE: Final = Route(
    "prediction.create",
    "POST",
    "/v1/predictions",
    prediction.PredictionCreateRequest,
    prediction.PredictionInfo,
    Role.OPERATOR,
    "Simulate a plan.",
    form=AnswerForm.JOB,
    creates=True,
    offline=True,
)

# -- trainings --------------------------------------------------------------------------------------------

TRAIN_GPG: Final = Route(
    "policy.train.gpg",
    "POST",
    "/v1/trainings/gpg",
    training.GpgTrainingRequest,
    training.GpgTrainingReply,
    Role.OPERATOR,
    "Train the policy that schedules models.",
    form=AnswerForm.JOB,
    creates=True,
    offline=True,
)
TRAIN_MADDPG: Final = Route(
    "policy.train.maddpg",
    "POST",
    "/v1/trainings/maddpg",
    training.MaddpgTrainingRequest,
    training.MaddpgTrainingReply,
    Role.OPERATOR,
    "Train the policy that combines blocks and launches.",
    form=AnswerForm.JOB,
    creates=True,
    offline=True,
)
# -- learned policies -------------------------------------------------------------------------------------

POLICY_LIST: Final = Route(
    "policy.list",
    "GET",
    "/v1/policies",
    policy.PolicyListRequest,
    Page[policy.PolicyInfo],
    Role.VIEWER,
    "Learned policies, newest first.",
    offline=True,
)
POLICY_IMPORT: Final = Route(
    "policy.import",
    "POST",
    "/v1/policies",
    policy.PolicyImportRequest,
    policy.PolicyImportReply,
    Role.OPERATOR,
    "Keep a policy that was trained elsewhere.",
    form=AnswerForm.UPLOAD,
)
POLICY_CHECK: Final = Route(
    "policy.check",
    "POST",
    "/v1/policies/{policy}/check",
    policy.PolicyCheckRequest,
    policy.PolicyVerdict,
    Role.OPERATOR,
    "Whether a learned policy may plan.",
    form=AnswerForm.JOB,
    offline=True,
)
POLICY_EXPORT: Final = Route(
    "policy.export",
    "GET",
    "/v1/policies/{policy}/checkpoint",
    policy.PolicyExportRequest,
    bytes,
    Role.VIEWER,
    "A policy as a file.",
    form=AnswerForm.DOWNLOAD,
    offline=True,
)

# -- who may use the API ----------------------------------------------------------------------------------

ACCESS_LIST: Final = Route(
    "access.list",
    "GET",
    "/v1/access-tokens",
    access.AccessListRequest,
    Page[access.AccessInfo],
    Role.ADMIN,
    "Tokens for this API, by name.",
    offline=True,
)
ACCESS_CREATE: Final = Route(
    "access.create",
    "POST",
    "/v1/access-tokens",
    access.AccessCreateRequest,
    access.AccessCreateReply,
    Role.ADMIN,
    "Make a token for this API.",
    creates=True,
    secret=True,
)
ACCESS_REVOKE: Final = Route(
    "access.revoke",
    "DELETE",
    "/v1/access-tokens/{name}",
    access.AccessRevokeRequest,
    Done,
    Role.ADMIN,
    "Refuse a token from its next request on.",
)
AUDIT_LIST: Final = Route(
    "audit.list",
    "GET",
    "/v1/audit",
    access.AuditListRequest,
    Page[access.AuditEntry],
    Role.ADMIN,
    "What clients changed, or tried to; newest first.",
    offline=True,
)

# -- jobs -------------------------------------------------------------------------------------------------

JOB_LIST: Final = Route(
    "job.list",
    "GET",
    "/v1/jobs",
    job.JobListRequest,
    Page[job.JobInfo],
    Role.VIEWER,
    "Jobs since the planner started, newest first.",
)
JOB_SHOW: Final = Route(
    "job.show",
    "GET",
    "/v1/jobs/{job}",
    job.JobShowRequest,
    job.JobInfo,
    Role.VIEWER,
    "One job with its progress, and its result once there is one.",
)
JOB_CANCEL: Final = Route(
    "job.cancel",
    "DELETE",
    "/v1/jobs/{job}",
    job.JobCancelRequest,
    job.JobInfo,
    Role.OPERATOR,
    "End a job.",
)
JOB_EVENTS: Final = Route(
    "job.events",
    "GET",
    "/v1/jobs/{job}/events",
    job.JobEventsRequest,
    job.JobInfo,
    Role.VIEWER,
    "Follow a job to its end.",
    form=AnswerForm.EVENTS,
)

# -- webhooks ---------------------------------------------------------------------------------------------

WEBHOOK_ADD: Final = Route(
    "webhook.add",
    "POST",
    "/v1/webhooks",
    webhook.WebhookAddRequest,
    webhook.WebhookAddReply,
    Role.ADMIN,
    "Send messages about events to a URL.",
    creates=True,
    secret=True,
)
WEBHOOK_LIST: Final = Route(
    "webhook.list",
    "GET",
    "/v1/webhooks",
    webhook.WebhookListRequest,
    Page[webhook.WebhookInfo],
    Role.ADMIN,
    "Webhooks, and what became of their messages.",
    offline=True,
)
WEBHOOK_REMOVE: Final = Route(
    "webhook.remove",
    "DELETE",
    "/v1/webhooks/{webhook}",
    webhook.WebhookRemoveRequest,
    Done,
    Role.ADMIN,
    "Forget a webhook.",
)

ROUTES: Final[tuple[Route[Any, Any], ...]] = tuple(
    value for value in list(globals().values()) if isinstance(value, Route)
)
