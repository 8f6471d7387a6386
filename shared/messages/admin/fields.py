"""Constrained types that several admin messages share."""

from typing import Annotated

from msgspec import Meta

from stageloom.shared.messages.base import NO_NUL

Page = Annotated[int, Meta(ge=1, le=256)]
PathText = Annotated[str, Meta(min_length=1, max_length=4096, pattern=NO_NUL)]
After = Annotated[str, Meta(max_length=64, pattern=NO_NUL)]
LongText = Annotated[str, Meta(max_length=512 << 10, pattern=NO_NUL)]
UpToAMinute = Annotated[float, Meta(ge=0.0, le=60.0)]
