"""One look at a page: who looks, at what, and how pages ask the planner's verbs."""

from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from stageloom.planner.api.access import Principal
from stageloom.planner.api.bounds import Refusal
from stageloom.planner.api.context import ApiCall, ApiContext
from stageloom.planner.api.handlers import handler_of
from stageloom.planner.api.problem import problem
from stageloom.planner.api.route import Route, plainly
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.base import Request
from stageloom.shared.errors import ExitCode, InputError, UnavailableError

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")

_PATIENCE_S: Final = 60.0


class Rendered(NamedTuple):
    """A template's name and what it shows."""

    template: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A request for a page by somebody who is signed in. `path` and `query`: its parameters; a parameter that
    came twice has its last value. `begun`: the site's answers that are still computed, by what was asked."""

    api: ApiContext
    principal: Principal
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    begun: MutableMapping[tuple[str, bytes], Future[Any]] = field(default_factory=dict)

    def may(self, role: Role) -> bool:
        """Whether who looks has this role."""
        return self.principal.may(role)

    def require(self, role: Role) -> None:
        """Raises:
        Refusal: who looks does not have this role.
        """
        if not self.may(role):
            cause = f"this page is for the role {role.value}"
            raise Refusal(problem(HTTPStatus.FORBIDDEN, cause, "sign in with its token", ExitCode.DENIED))

    def ask(self, route: Route[Q, R], kind: type[Q], /, **fields: Any) -> R:
        """What a verb answers to a request of this kind with these fields.

        Raises:
            Refusal: the verb is for another role.
            StageloomError: the verb's own errors; InputError: a field is out of bounds; UnavailableError: it
                takes longer than a page waits.
        """
        self.require(route.role)
        try:
            request = msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            raise InputError(plainly(str(error)), remedy="follow the links of the page") from error
        reply: Any = self._reply(route, request)
        try:
            answer: R = reply.result(_PATIENCE_S) if isinstance(reply, Future) else reply
        except TimeoutError as error:
            command = f"`stageloom {route.name.replace('.', ' ')}`"
            raise UnavailableError(
                f"it takes longer than the {_PATIENCE_S:g} s that a page waits: {command} waits longer",
                remedy="use that, or load the page again in a while",
            ) from error
        return answer

    def _reply(self, route: Route[Any, Any], request: Request) -> Any:
        """The handler's; a page that is loaded again waits for what was begun for it, and begins no other."""
        key = (route.name, msgspec.json.encode(request))
        reply = self.begun.get(key)
        if reply is None:
            reply = handler_of(route)(self.api, request, ApiCall(self.principal))
            if isinstance(reply, Future):
                self.begun[key] = reply
                reply.add_done_callback(lambda _: self.begun.pop(key, None))
        return reply


View = Callable[[Visit], Rendered]
