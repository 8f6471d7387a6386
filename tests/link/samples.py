"""One filled-in value of every message type and row kind: the source of the golden files."""

from typing import Any

from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import admin, bulk, control, enrol, telemetry
from stageloom.shared.messages.base import Message, RefusalCode, Refused

PLAN = Digest("ab" * 32)
ARTIFACT = Digest("0c" * 32)
DEVICE = DeviceId("bench-1")
KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
BOOT = 4_611_686_018_427_387

NEED = control.ArtifactNeed("resnet50", ARTIFACT, 102_400_000)
REPORT = control.Report(
    revision=17,
    epoch=2,
    generation=9,
    seen=PLAN,
    active=PLAN,
    origin=control.Origin.PLANNER,
    local_counter=1,
    state=control.DeviceState.PROBATION,
    reason="activated by an operator",
)
BOOKS = admin.TelemetryBooks(produced=42, stored=36, dropped=3, lost=3)
DEVICE_INFO = admin.DeviceInfo(
    device=DEVICE,
    online=True,
    revoked=False,
    device_class="cpu-2",
    agent_version="0.1.0",
    enrolled_at_us=1_700_000_000_000_000,
    last_seen_us=1_700_000_100_000_000,
    desired_epoch=2,
    desired_generation=9,
    desired_plan=PLAN,
    report=REPORT,
)
HISTORY = admin.HistoryEntry(
    device=DEVICE,
    epoch=2,
    generation=9,
    plan="demo",
    digest=PLAN,
    decided_by="operator",
    state="committed",
    reason="",
    at_us=1_700_000_000_000_000,
)
MODEL_INFO = admin.ModelInfo(
    model="resnet50",
    digest=ARTIFACT,
    size_bytes=102_400_000,
    operators=87,
    base_cuts=5,
    opaque=0,
    added_at_us=1_700_000_000_000_000,
)
CONTEST_FIGURES = admin.TournamentFigures(
    name="aligned-ios, paper",
    at_s=1.25,
    throughput_per_s=60.0,
    p99_s=0.02,
    utilisation=0.5,
    met=1.0,
    led=True,
)
PLAN_INFO = admin.PlanInfo(
    plan="demo",
    digest=PLAN,
    scheduler="greedy",
    models=("resnet50",),
    created_at_us=1_700_000_000_000_000,
    text="0 1|2",
    wire=b"\x93\x01\x02\x03",
    text_bytes=5,
    wire_bytes=4,
)
RANGES = (telemetry.RowRange(BOOT, 40, 41),)
LEDGERS = (telemetry.Ledger(BOOT, 42, 3),)

ROWS: tuple[Any, ...] = (
    telemetry.TaskCounters("resnet50", 1_000_000, 11, 7, 1, 1, 1, 1),
    telemetry.LatencyHistogram("resnet50", 3, 6_000, 4_000, ((28, 2), (35, 1))),
    telemetry.QueueSample("resnet50", 4, 120_000, 30_000),
    telemetry.StepTimings("abababababababab", 1, 0b101, 12, 48_000, 6_000),
    telemetry.StepTrace("abababababababab", 1, 0b101, 0, 4_000, (telemetry.GroupSpan(0, 1, 10, 900),)),
    telemetry.ProfileResult(
        3, ARTIFACT, 1, "cpu-2/1.31.1", (telemetry.OperatorTiming(0, 812.5, 3.25, 20),), True
    ),
    telemetry.StateChange(
        2, 9, control.DeviceState.COMMITTED, PLAN, control.Origin.PLANNER, "probation passed"
    ),
    telemetry.Event("engine_restarted", "exit status -9"),
    telemetry.Utilisation("gpu_load", None, "percent"),
    telemetry.DifferenceSample("resnet50", 2.5e-7, 0.31),
    telemetry.StageProfileResult(
        4, PLAN, 1, "cpu-2/1.31.1", (telemetry.StageTiming(0, 640.0, 2.5, 20),), 1_310.5, True
    ),
    telemetry.TrialEnded(
        2,
        9,
        control.Origin.PLANNER,
        "trial",
        "commit",
        PLAN,
        Digest("cd" * 32),
        1.31,
        1.27,
        1.36,
        9,
        1_700_000_000_000_000,
        1_700_000_004_700_000,
        "better by more than 2%",
    ),
    telemetry.PlanActivated(PLAN, control.Origin.PLANNER, 2, 9),
)

MESSAGES: tuple[Message, ...] = (
    Refused(correlation=5, code=RefusalCode.SUPERSEDED, reason="a newer agent has this key", boot=BOOT),
    control.Hello(boot=BOOT, connection=2, agent_version="0.1.0", device_class="cpu-2", report=REPORT),
    control.Welcome(device=DEVICE, epoch=2, heartbeat_interval_s=1.0, bulk_credits=4),
    control.Heartbeat(
        correlation=6, boot=BOOT, epoch=2, generation=9, state=control.DeviceState.COMMITTED, revision=18
    ),
    control.HeartbeatAck(correlation=6, epoch=2, generation=9, revision=18),
    control.Desired(
        epoch=2,
        generation=9,
        plan_digest=PLAN,
        plan=b"\x93\x01\x02\x03",
        artifacts=(NEED,),
        profiles=(control.ProfileRequest(3, NEED, 1, 20.0),),
        stage_profile=control.StageProfileRequest(
            request=4, plan_digest=PLAN, plan=b"\x93\x01\x02\x03", artifacts=(NEED,), budget_s=10.0
        ),
        autonomy=control.Autonomy.PROVEN,
        activation=control.Activation.NOW,
        policy=control.PolicyNeed(Digest("ef" * 32), 4_194_304),
    ),
    control.Alarm(
        boot=BOOT,
        number=3,
        at_us=1_700_000_000_000_000,
        cause="variance",
        value=0.081,
        threshold=0.0625,
        plan=PLAN,
        loads=(control.ModelLoad("resnet50", 12.5, 30_000.0, 40, 900_000),),
        samples=(control.AlarmSample((0b101,), (0.0,)),),
    ),
    control.AlarmAck(boot=BOOT, number=3),
    control.LocalPlan(
        boot=BOOT,
        epoch=2,
        generation=9,
        local_counter=2,
        plan_digest=PLAN,
        plan=b"\x93\x01\x02\x03",
        artifacts=(NEED,),
        cause="variance",
    ),
    control.Reported(boot=BOOT, report=REPORT),
    control.ReportedAck(revision=17),
    telemetry.TelemetryBatch(
        correlation=7,
        rows=tuple(
            telemetry.encode_row(telemetry.Row(1_700_000_000_000_000 + at, data))
            for at, data in enumerate(ROWS[:2])
        ),
        ranges=RANGES,
        ledgers=LEDGERS,
    ),
    telemetry.TelemetryAck(correlation=7, ranges=RANGES, ledgers=LEDGERS),
    bulk.ChunkRequest(correlation=8, digest=ARTIFACT, offset_bytes=262_144, length_bytes=4),
    bulk.Chunk(
        correlation=8, digest=ARTIFACT, offset_bytes=262_144, size_bytes=262_148, data=b"\x00\x01\x02\x03"
    ),
    enrol.EnrolRequest(
        secret=bytes(range(16)), public_key=KEY, device=DEVICE, agent_version="0.1.0", device_class="cpu-2"
    ),
    enrol.EnrolReply(device=DEVICE),
    admin.DeviceTokenRequest(device=DEVICE, lifetime_s=600.0),
    admin.DeviceTokenReply(token="stgl1.xyz", expires_at_us=1_700_000_600_000_000),
    admin.DeviceListRequest(after="a", limit=10),
    admin.DeviceListReply(devices=(DEVICE_INFO,), more=True),
    admin.DeviceShowRequest(device=DEVICE),
    admin.DeviceShowReply(device=DEVICE_INFO, history=(HISTORY,)),
    admin.DeviceReleaseRequest(device=DEVICE),
    admin.DeviceRevokeRequest(device=DEVICE),
    admin.DeviceProfileRequest(device=DEVICE, models=("resnet50",), budget_s=5.0),
    admin.DeviceProfileReply(requests=(3,), epoch=2, generation=10),
    admin.StageProfileCreate(device=DEVICE, plan="demo", budget_s=5.0),
    admin.DeviceReplanRequest(device=DEVICE, enabled=True, scheduler="ios", members_max=2, budget_s=4.0),
    admin.DeviceReplanReply(
        enabled=True, scheduler="ios", members_max=2, budget_s=4.0, proposer=admin.Proposer.LEARNED
    ),
    admin.ModelAddRequest(model="resnet50", path="/srv/resnet50.stgl", digest=ARTIFACT),
    admin.ModelReply(model=MODEL_INFO),
    admin.ModelListRequest(),
    admin.ModelListReply(models=(MODEL_INFO,)),
    admin.ModelRemoveRequest(model="resnet50"),
    admin.PlanCreateRequest(plan="demo", models=(admin.ModelOptions(model="resnet50"),), device=DEVICE),
    admin.PlanReply(
        plan=PLAN_INFO,
        contest=admin.TournamentInfo(
            winner="aligned-ios, paper",
            twin="derived from nano",
            arrivals="poisson: resnet50 60/s",
            judged=(CONTEST_FIGURES,),
            failed=(
                admin.TournamentFailure(name="opara, whole", reason="a search process ended with code -9"),
            ),
            left=3,
            fresh=(CONTEST_FIGURES,),
        ),
    ),
    admin.PlanCancelRequest(ticket=77),
    admin.PlanProgressRequest(ticket=77),
    admin.PlanProgressReply(
        done=3, size=20, elapsed_s=1.5, best="sequential, whole", throughput_per_s=60.0, p99_s=0.02
    ),
    admin.PlanShowRequest(plan="demo"),
    admin.PlanPushRequest(plan="demo", device=DEVICE),
    admin.PlanPushReply(epoch=2, generation=9, autonomy=control.Autonomy.PROVEN),
    admin.PolicyAttachRequest(device=DEVICE, policy="maddpg"),
    admin.FleetPushRequest(plan="demo", devices=(DEVICE,)),
    admin.FleetPushReply(
        pushed=(
            admin.Pushed(device=DEVICE, epoch=2, generation=9, autonomy=control.Autonomy.FULL),
            admin.Pushed(device=DeviceId("gone"), cause="there is no device 'gone'"),
        ),
        more=True,
    ),
    admin.PlanHistoryRequest(device=DEVICE),
    admin.PlanHistoryReply(entries=(HISTORY,), next_before=12),
    admin.WatchRequest(),
    admin.WatchReply(
        at_us=1_700_000_000_000_000,
        devices=(DEVICE_INFO,),
        rates=(
            admin.ModelRate(
                device=DEVICE,
                model="resnet50",
                throughput_per_s=12.5,
                latency_p50_ms=8.0,
                latency_p99_ms=11.5,
                queued=2,
            ),
        ),
        telemetry=BOOKS,
    ),
    admin.StatusRequest(),
    admin.StatusReply(
        planner_version="0.1.0",
        epoch=2,
        devices=1,
        online=1,
        telemetry_backlog=0,
        telemetry=BOOKS,
        uptime_s=12.5,
        notices=("device nano: local_plan_refused: it may not plan alone",),
    ),
    admin.ClockTrustRequest(),
    admin.Done(correlation=9),
    admin.Failed(cause="no such device: x", remedy="see `stageloom device list`", exit_code=2),
)
