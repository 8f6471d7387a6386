"""One filled-in value of every message type and row kind: the source of the golden files."""

from typing import Any

from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages import bulk, control, enrol, telemetry
from stageloom.shared.messages.base import Message, RefusalCode, Refused
from stageloom.shared.messages.outputs import OutputsVerdict
from stageloom.shared.partition import Axis

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
        "latency",
        1.31,
        1.02,
        OutputsVerdict(0.01, 32, False, "resnet50", "logits", 0.75, 3.0, 0.25, 0.875, (0, 17), "3", "-0.5"),
        "cpu-2/1.31.1",
    ),
    telemetry.PlanActivated(PLAN, control.Origin.PLANNER, 2, 9),
    telemetry.MachineFacts(
        (telemetry.CoreRange(0, 3), telemetry.CoreRange(6, 6)),
        (telemetry.ExecutorFact("onnx"), telemetry.ExecutorFact("torch_cuda", "no GPU")),
        1,
    ),
    telemetry.ExecutorTime(ARTIFACT, "openvino", 1, 1, "cpu-2/1.31.1", 4_812.5, 9),
    telemetry.PartProfileResult(
        3,
        ARTIFACT,
        "cpu-2/1.31.1",
        (
            telemetry.PartTiming(4, Axis.CHANNELS, 16, 128.5, 1.25, 5),
            telemetry.PartTiming(4, Axis.ROWS, 28, 384.0, 2.5, 5),
        ),
        131.5,
        4.5e9,
    ),
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
)
