"""One look at a page: who looks, at what, and how pages ask the planner's verbs."""

from collections.abc import Callable, Mapping
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
from stageloom.shared.errors import ExitCode, InputError

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
    came twice has its last value."""

    api: ApiContext
    principal: Principal
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

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
            StageloomError: the verb's own errors; InputError: a field is out of bounds.
        """
        self.require(route.role)
        try:
            request = msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            raise InputError(plainly(str(error)), remedy="follow the links of the page") from error
        reply: Any = handler_of(route)(self.api, request, ApiCall(self.principal))
        answer: R = reply.result(_PATIENCE_S) if isinstance(reply, Future) else reply
        return answer


View = Callable[[Visit], Rendered]
