"""The errors of this project: whose fault they are, and whether a retry may help.

Raised everywhere; turned into exit codes, HTTP statuses and gRPC codes only at the edges. Knows none of these.

    ModelSwarmError
    ├── MemoryLimitError     a server does not fit into the memory limit of its container
    ├── DeviceError          a server's device is missing, too small, or cannot compute
    ├── UserError            the caller's input: names the field and what is allowed; the same input fails again
    │   ├── ModelSourceError     the model's folder, address or files
    │   └── DocumentError        a swarm document
    ├── UnavailableError     no capacity or no server now: a retry may help
    └── UnreachableError     a gateway's API does not answer at an address
"""

from __future__ import annotations

from typing import Any, ClassVar


class ModelSwarmError(Exception):
    """Base of all errors this project raises on purpose. `str()` is one sentence for a person."""

    retryable: ClassVar[bool] = False
    is_user_error: bool = False  # True: the same input fails again
    exit_code: ClassVar[int] = 2  # of a process that ends with it

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the sentence and the fields: constructors of subclasses take other arguments.

        An error that cannot be unpickled stops a pool of processes for ever.
        """
        return _restore_error, (type(self), *self.args), self.__dict__


def _restore_error(kind: type[ModelSwarmError], *arguments: Any) -> ModelSwarmError:
    return kind.__new__(kind, *arguments)


class UserError(ModelSwarmError):
    """Input that cannot be accepted. `field` is its name as the user writes it."""

    is_user_error = True

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class MemoryLimitError(ModelSwarmError):
    """A server does not fit into the memory limit of its container; the sentence says which field to change."""

    exit_code: ClassVar[int] = 3


class DeviceError(ModelSwarmError):
    """A device is missing, too small, or cannot compute what it is asked for; the sentence says what is allowed."""

    exit_code: ClassVar[int] = 4


class ModelSourceError(UserError):
    """The model's folder, address or files cannot be used."""


class DocumentError(UserError):
    """A swarm document does not follow the schema; `field` is the path inside it."""


class UnavailableError(ModelSwarmError):
    """No capacity, or no server, at this moment."""

    retryable: ClassVar[bool] = True

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class UnreachableError(ModelSwarmError):
    """A gateway's API does not answer at an address, or something else answers there."""

    def __init__(self, message: str, address: str, api: str) -> None:
        super().__init__(message)
        self.address = address  # `host:port`, or a URL
        self.api = api  # `HTTP` or `gRPC`
