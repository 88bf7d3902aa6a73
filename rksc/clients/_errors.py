"""What a request is refused with: OpenAI's error object, as an exception and as JSON.

Programs act on `code` and `param`: one that sees "context_length_exceeded" shortens its chat. So
the client in the process and the server say the same: what is an attribute here is a key there.
"""

from __future__ import annotations

from typing import Any

from .._core import CapacityError


class RequestError(ValueError):
    """A request that is refused. Its attributes are those of the openai package's APIStatusError:
    message, type, param (the field), code, status_code, and body, the error object."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status_code: int = 400,
    ) -> None:
        self.message = printable(message, 2000)
        self.param = None if param is None else printable(param, 100)
        self.code, self.status_code = code, status_code
        super().__init__(self.message)

    @property
    def type(self) -> str:
        return "invalid_request_error" if self.status_code < 500 else "server_error"

    @property
    def body(self) -> dict[str, Any]:
        return {
            "message": self.message, "type": self.type, "param": self.param, "code": self.code,
        }  # fmt: skip


class FieldError(RequestError):
    """A field of a request that is wrong; `field` names it."""

    def __init__(
        self, field: str, message: str, code: str | None = "invalid_value", status_code: int = 400
    ) -> None:
        super().__init__(message, param=field, code=code, status_code=status_code)
        self.field = field


class ContextLengthError(FieldError, CapacityError):
    """More tokens than the model has positions, or than the KV budget holds."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message, "context_length_exceeded")


def printable(text: str, longest: int) -> str:
    """A text that any log and any answer can hold, whatever a request made of it."""
    text = text if len(text) <= longest else text[:longest] + "..."
    return text.encode(errors="backslashreplace").decode()


def error_of(error: Exception) -> RequestError:
    """Whatever went wrong as an error of a request: a ValueError is the request's own fault, after
    a CapacityError it had better ask for less, anything else is the server's."""
    if isinstance(error, RequestError):
        return error
    said = str(error) or type(error).__name__
    if isinstance(error, CapacityError):
        return ContextLengthError("max_tokens", said)
    return RequestError(said, status_code=400 if isinstance(error, ValueError) else 500)
