"""Errors as clients get them, in OpenAI's shape."""

from __future__ import annotations

from typing import Any, NoReturn

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        param: the field of the body that it is about.
        code: a word for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad(message: str, param: str) -> NoReturn:
    """Raise the answer to a field with a wrong value.

    Raises:
        ApiError: 400 with the field's name.
    """
    raise ApiError(400, message, param, "invalid_value")
