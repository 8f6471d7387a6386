"""A dispatch server as a process that may die: `python -m tests.adversary.victim filtered|unfiltered`.

It prints one line of JSON (`endpoints`, `server_key`, `keys` of the enrolled device `a`), then obeys lines
of stdin: `hold` stops the thread that owns the sockets, `release` lets it go on, `malformed N` waits until it
has read N messages that are none. Each is answered by one line.
"""

import json
import sys
import threading

import msgspec

from stageloom.planner.dispatch import sockets
from stageloom.planner.dispatch.quotas import Quota, Rate
from tests.link.rig import Rig, wait_until


def main() -> None:
    if sys.argv[1] == "unfiltered":
        sockets._drop_resets = lambda bound: None
    rig = Rig(quotas=dict.fromkeys(Quota, Rate(1e9, 1e9)))  # libzmq is what is tested here
    keys = rig.enrolled("a")
    rig.start()
    said = {
        "endpoints": dict(
            zip(rig.endpoints.__struct_fields__, msgspec.to_builtins(rig.endpoints), strict=True)
        ),
        "server_key": rig.keys.public,
        "keys": [keys.public, keys.secret],
    }
    print(json.dumps(said), flush=True)  # noqa: T201  (its interface)
    go = threading.Event()
    for line in sys.stdin:
        match line.split():
            case ["hold"]:
                _hold(rig, go)
            case ["release"]:
                go.set()
            case ["malformed", number]:
                _await_malformed(rig, int(number))
        print("done", flush=True)  # noqa: T201
    rig.server.stop()


def _hold(rig: Rig, go: threading.Event) -> None:
    held = threading.Event()

    def hold() -> None:
        held.set()
        go.wait()

    rig.server.post(hold)  # type: ignore[arg-type]
    held.wait()


def _await_malformed(rig: Rig, number: int) -> None:
    wait_until(lambda: rig.count("malformed") >= number, timeout_s=60.0)


if __name__ == "__main__":
    main()
