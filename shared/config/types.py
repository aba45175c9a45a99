"""What the sections of the configuration are made of: their base class, and numbers with a range."""

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, Meta(ge=0.0)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""
