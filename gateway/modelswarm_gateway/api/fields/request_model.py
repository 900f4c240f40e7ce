"""Base of the models of requests: strict types, and every field checked against the table of its object.

A subclass names its table. Fields that have no effect, or are null, are left out before pydantic sees the object.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from modelswarm_gateway.api.fields.states import FieldError, FieldTable

FIELD_ERROR = "field_error"  # type of the findings that are made here


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    table: ClassVar[FieldTable]

    @model_validator(mode="before")
    @classmethod
    def _take_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        try:
            return cls.table.take(values)
        except FieldError as error:
            raise PydanticCustomError(FIELD_ERROR, "refused field", {"error": error}) from error

    def obeyed_fields(self) -> dict[str, Any]:
        """Return the fields of the body, and of its objects, that have an effect."""
        return self.model_dump(exclude_unset=True)
