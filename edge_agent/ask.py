"""One question to the agent of this machine; standard library and msgspec only."""

from pathlib import Path

import msgspec

from stageloom.edge_agent.ingest import channel
from stageloom.edge_agent.ingest.messages import (
    PROTOCOL_VERSION,
    AgentWelcome,
    AskStatus,
    ClientHello,
    Goodbye,
    Status,
    decode_to_application,
    encode,
)
from stageloom.edge_agent.reporting.status import AgentStatus
from stageloom.shared.errors import DecodeError, UnavailableError


def ask_status(path: Path, timeout_s: float = 5.0) -> AgentStatus:
    """The status of the agent that listens at `path`.

    Raises:
        UnavailableError: no agent answers in time.
    """
    sock = channel.connect(path, timeout_s)
    try:
        sock.send(encode(ClientHello(PROTOCOL_VERSION)))
        sock.send(encode(AskStatus(0)))
        while True:
            packet, _ = channel.receive(sock)
            if not packet:
                raise UnavailableError(f"the agent at {path} hung up", remedy="look at its log")
            match decode_to_application(packet):
                case Status(_, body):
                    return msgspec.json.decode(body, type=AgentStatus)
                case Goodbye(reason):
                    raise UnavailableError(f"the agent at {path} turned us away: {reason}")
                case AgentWelcome():
                    continue
    except (OSError, DecodeError, msgspec.MsgspecError) as error:
        raise UnavailableError(
            f"the agent at {path} does not answer: {error}", remedy="look at its log"
        ) from error
    finally:
        sock.close()
