"""Webhooks: signed as the standard asks, sent nowhere inside, kept until they arrive, and bounded."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from stageloom.planner.cli.app import execute
from stageloom.planner.config import PlannerConfig
from stageloom.planner.enrolment.service import certificate_digest
from stageloom.planner.schema.webhook import WebhookEvent
from stageloom.planner.service import Planner
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.webhooks import (
    webhook_infos,
)
from stageloom.planner.webhooks.address import address_problem, checked_url
from stageloom.planner.webhooks.sender import NotDelivered, send
from stageloom.planner.webhooks.signature import secret_text, signed_headers
from stageloom.shared.errors import ExitCode, InputError
from stageloom.shared.messages.control import Alarm
from tests.planner.processes import ok, until
from tests.store.helpers import NANO, enrol
from tests.store.migrated import begin_migrated

SECRET = secret_text(bytes(range(32)))
ALARM, VERDICT = WebhookEvent
FIRED = Alarm(
    boot=7,
    number=1,
    at_us=1_000_000,
    cause="variance",
    value=0.5,
    threshold=0.0625,
    plan=None,
    loads=(),
    samples=(),
)


class Receiver:
    """An HTTP server of a stranger; `answer` is the status that it gives, `hold` keeps its answer back."""

    def __init__(self) -> None:
        self.taken: list[tuple[dict[str, str], bytes]] = []
        self.answer = 204
        self.hold: threading.Event | None = None
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.taken.append((dict(self.headers.items()), body))
                if receiver.hold is not None:
                    receiver.hold.wait(30)
                self.send_response(receiver.answer)
                if receiver.answer == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?of=planner"

    def close(self) -> None:
        if self.hold is not None:
            self.hold.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Dripping:
    """A stranger that sends a byte each 0.05 s, for half a minute; `cut` is set once nobody reads on."""

    def __init__(self, answer: bytes, context: ssl.SSLContext | None) -> None:
        self.cut = threading.Event()
        self._answer = answer
        self._context = context
        self._stop = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            link, _ = self._listening.accept()
            with closing(link):
                if self._context is not None:
                    link = self._context.wrap_socket(link, server_side=True)
                self._drip(link)

    def _drip(self, link: socket.socket) -> None:
        with closing(link):
            try:
                for at in range(len(self._answer)):
                    link.sendall(self._answer[at : at + 1])
                    if self._stop.wait(0.05):
                        return
            except OSError:
                self.cut.set()

    def close(self) -> None:
        self._stop.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with closing(Receiver()) as made:
        yield made


@pytest.mark.promise("webhooks-signed-and-kept")
def test_a_strangers_library_verifies_the_signature_and_refuses_any_change() -> None:
    import time

    body, now_s = b'{"type":"alarm"}', int(time.time())  # the library looks at the clock by itself
    headers = signed_headers(SECRET, "msg_1", now_s, body)
    assert Webhook(SECRET).verify(body, headers) == {"type": "alarm"}
    for changed in (
        {**headers, "webhook-id": "msg_2"},
        {**headers, "webhook-timestamp": str(now_s + 1)},
    ):
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(body, changed)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(b'{"type":"alarn"}', headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(secret_text(bytes(32))).verify(body, headers)


@pytest.mark.parametrize(
    ("text", "public", "private"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1:248:1893:25c8:1946", True, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("10.1.2.3", False, True),
        ("172.16.0.1", False, True),
        ("192.168.1.1", False, True),
        ("100.64.0.1", False, True),
        ("fd00::1", False, True),
        ("fec0::1", False, True),
        ("169.254.169.254", False, False),
        ("100.100.100.200", False, False),
        ("168.63.129.16", False, False),
        ("192.0.0.192", False, False),
        ("192.88.99.1", False, False),
        ("fd00:ec2::254", False, False),
        ("fd20:ce::254", False, False),
        ("::ffff:100.100.100.200", False, False),
        ("fe80::1", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("255.255.255.255", False, False),
        ("::ffff:127.0.0.1", False, True),
        ("::ffff:169.254.169.254", False, False),
        ("2002:a9fe:a9fe::", False, False),  # 6to4 of 169.254.169.254
        ("64:ff9b::a9fe:a9fe", False, False),
        ("64:ff9b::7f00:1", False, True),
    ],
)
@pytest.mark.promise("webhooks-go-nowhere-inside")
def test_what_is_inside_is_refused_however_it_is_written(text: str, public: bool, private: bool) -> None:
    address = ip_address(text)
    assert (not address_problem(address, private=False)) == public
    assert (not address_problem(address, private=True)) == private


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/",
        "https:///path",
        "http://example.com/",
        "https://user:secret@example.com/",
        "https://example.com:0/",
        "https://example.com:port/",
        "https://[::1/",
        "https://127.0.0.1/",
        "https://[::ffff:10.0.0.1]/",
        "https://example.com/a\r\nX: b",
        "https://example.com/größe",
        "https://example.com/?of=größe",
        "https://größe.example/",
        "nothing",
    ],
)
def test_a_url_that_leads_nowhere_or_inside_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        checked_url(url, private=False)


@pytest.mark.promise("webhooks-go-nowhere-inside")
def test_a_name_is_refused_by_what_it_resolves_to_and_redirections_are_not_followed(
    receiver: Receiver,
) -> None:
    port = receiver.url.partition("127.0.0.1:")[2].partition("/")[0]
    with pytest.raises(NotDelivered, match=r"localhost resolves to .* an address of a local network"):
        send(f"https://localhost:{port}/", {}, b"", private=False)
    assert receiver.taken == []
    for status, said in ((302, "answered 302"), (500, "answered 500"), (404, "answered 404")):
        receiver.answer = status
        with pytest.raises(NotDelivered, match=said) as failed:
            send(receiver.url, {}, b"{}", private=True)
        assert not failed.value.gone
    receiver.answer = 410
    with pytest.raises(NotDelivered) as failed:
        send(receiver.url, {}, b"{}", private=True)
    assert failed.value.gone
    assert len(receiver.taken) == 4, "none was followed"


def test_a_receiver_that_does_not_answer_or_listen_is_given_up(receiver: Receiver) -> None:
    receiver.hold = threading.Event()
    with pytest.raises(NotDelivered, match="no answer"):
        send(receiver.url, {}, b"{}", private=True, limit_s=0.1)
    receiver.hold.set()
    with closing(Receiver()) as gone:
        url = gone.url
    with pytest.raises(NotDelivered, match="no connection"):
        send(url, {}, b"{}", private=True)


@pytest.mark.parametrize("part", ["handshake", "answer"])
def test_a_receiver_that_drips_within_tls_is_cut_off(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "receiver.pem"
    certificate_digest(file, hosts=["127.0.0.1"])
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    if part == "handshake":
        context, answer = None, b"\x16\x03\x03\x40\x00" + bytes(600)  # a record of 16 KiB begins
    else:
        context, answer = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            b"HTTP/1.1 204 X\r\nX: %b\r\n\r\n" % (b"x" * 600),
        )
        context.load_cert_chain(file)
    with closing(Dripping(answer, context)) as dripping:
        with pytest.raises(NotDelivered, match="no answer"):
            send(f"https://127.0.0.1:{dripping.port}/", {}, b"{}", private=True, limit_s=1)
        assert dripping.cut.wait(10), "before it had sent all"


def test_addresses_are_tried_in_turn_and_the_host_is_named_as_in_the_url(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = receiver.url.partition("127.0.0.1:")[2].partition("/")[0]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # its own, and does not listen
        refuses = silent.getsockname()
        places = [refuses, ("127.0.0.1", int(port))]

        def found(*_: object, **__: object) -> list[object]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]

        monkeypatch.setattr(socket, "getaddrinfo", found)
        for named in (f"[::1]:{port}", "two.example"):
            send(f"http://{named}/", {}, b"{}", private=True)
            assert receiver.taken[-1][0]["Host"] == named
        places.remove(places[1])
        with pytest.raises(NotDelivered, match="no connection"):
            send("http://two.example/", {}, b"{}", private=True)


@pytest.mark.promise("webhooks-signed-and-kept")
def test_an_alarm_reaches_a_receiver_that_verifies_it(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. Refused without leave to go inside. 2. An alarm is told once, however often it comes."""
    config = PlannerConfig(data_dir=tmp_path / "home", listen="127.0.0.1:0", search="local", search_workers=1)
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner:
        home = str(config.data_dir)
        assert execute(["webhook", "add", receiver.url, "--data-dir", home]) == ExitCode.USAGE
        assert "use https, or --allow-private" in capsys.readouterr().err
        added = ["webhook", "add", receiver.url, "--allow-private", "--name", "ops", "--events", "alarm"]
        secret = ok(config.data_dir, *added).strip()
        enrol(planner.store)
        for _ in range(2):
            LinkStore(planner.store).record_alarm(NANO, FIRED)
        until(lambda: receiver.taken)
        headers, body = receiver.taken[0]
        told = Webhook(secret).verify(body, {name.lower(): value for name, value in headers.items()})
        assert told["type"] == "alarm" and told["data"]["device"] == NANO
        assert headers["Content-Type"] == "application/json"
        until(lambda: planner.store.read(webhook_infos)[0].arrived == 1)
        assert secret not in ok(config.data_dir, "webhook", "list", "--json")
        assert "1\t0" in ok(config.data_dir, "webhook", "list")
        ok(config.data_dir, "webhook", "remove", "ops")
    assert len(receiver.taken) == 1
