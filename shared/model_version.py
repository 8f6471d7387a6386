"""`detector@2`: a model's name, and the number of one of its versions where one is meant."""

import re
from typing import Final, NamedTuple

from stageloom.shared.errors import InputError

MOST_VERSIONS: Final = 999_999
_VERSION: Final = re.compile(r"[1-9][0-9]{0,5}")


class ModelReference(NamedTuple):
    """A name and a version from 1 on; None: the newest, or the only one."""

    name: str
    version: int | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}@{self.version}"


def model_reference(text: str) -> ModelReference:
    """Read `NAME` or `NAME@VERSION`; the name itself is not checked.

    Raises:
        InputError: what follows the `@` is no version.
    """
    name, at, version = text.partition("@")
    if not at:
        return ModelReference(name)
    if not _VERSION.fullmatch(version):
        raise InputError(
            f"{text[:80]!r} names no version", remedy="write a number from 1 on behind the @, like detector@2"
        )
    return ModelReference(name, int(version))
