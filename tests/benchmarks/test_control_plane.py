"""`benchmarks.control_plane` on a small fleet: every phase ends, and nothing acknowledged is lost."""

import pytest

from benchmarks.control_plane.__main__ import measure


@pytest.mark.full
def test_a_small_fleet_goes_through_every_phase() -> None:
    figures, rows = measure(12, 2.0)
    assert figures["devices"] == 12 and figures["lost_acknowledged"] == 0
    assert figures["heartbeats_per_s"] > 0 and figures["rows_committed_per_s"] > 0
    assert figures["acknowledged_rows_at_end"] >= figures["acknowledged_rows_at_kill"] > 0
    assert [row["phase"] for row in rows] == [
        "connect",
        "heartbeats alone",
        "heartbeats and telemetry",
        "push beside heartbeats and telemetry",
    ]
