"""The example of a camera's loop: its place for one frame, and the whole of it against an agent."""

import subprocess
import sys

import numpy as np
import pytest

from examples.camera import NewestFrame
from tests.agent.process import AgentProcess
from tests.architecture.sources import ROOT


def test_a_new_frame_drives_out_the_one_that_waits_and_the_last_is_still_handed_out() -> None:
    place = NewestFrame()
    for number in range(3):
        place.put(np.array([number]))
    place.end()
    assert [int(frame[0]) for frame in place] == [2]
    assert place.driven_out == 2


@pytest.mark.promise("examples-work")
def test_every_frame_of_the_camera_is_accounted_for(agent: AgentProcess) -> None:
    serving = agent.now().serving
    assert serving is not None
    address = serving.http.removeprefix("http://")
    command = [sys.executable, "-m", "examples.camera", address, "tiny", "--frames", "20", "--rate", "100"]
    done = subprocess.run(
        [*command, "--deadline-ms", "5000"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    counts = {
        words: int(number)
        for number, _, words in (part.partition(" ") for part in done.stdout.strip().split(", "))
    }
    assert sum(counts.values()) == 20
    assert counts["seen"] >= 1
    assert set(counts) <= {"seen", "replaced by a newer one"}
