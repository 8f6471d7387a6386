"""`python -m stageloom.edge_agent.worker FD ENDS_FD CONFIG`: started by `EngineClient.start`, not by hand."""

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

from stageloom.edge_agent.worker.channel import Channel
from stageloom.edge_agent.worker.messages import decode_config
from stageloom.edge_agent.worker.process import EngineProcess

_EXIT_BUG = 70
_SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h


def _die(problem: threading.ExceptHookArgs) -> None:
    """A thread that ends by an exception leaves the engine stuck; a dead process is restarted."""
    logging.getLogger(__name__).critical(
        "thread %s failed; the engine process ends", problem.thread, exc_info=problem.exc_value
    )
    os._exit(_EXIT_BUG)


def main() -> NoReturn:
    """Take the inherited channels and serve."""
    config = decode_config(sys.argv[3])
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Applications see that the agent is gone by their sockets, which this process has, too: it goes with the
    # agent, also where it is frozen.
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the agent stops us
    sys.setswitchinterval(config.switch_interval_s)
    threading.excepthook = _die
    channel, ends = (Channel(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    EngineProcess(channel, ends, config).run()


if __name__ == "__main__":
    main()
