"""Exceptions: one class per kind of failure, each also of the builtin class that callers expect."""
from __future__ import annotations

from typing import Any, Dict, Optional, Type


class Error(RuntimeError):
    """A call of the library failed.

    status   the library's number, such as -2
    name     its name, such as "GLM52_E_INVALID"
    message  what happened, with which values
    hint     what to do; "" if the message says it all
    details  texts by key: "key" (of an option), "path", "tensor", "byte", "errno", ...
    """

    status: int = -16
    name: str = "GLM52_E_INTERNAL"

    def __init__(self, message: str, hint: str = "", details: Optional[Dict[str, str]] = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details: Dict[str, str] = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.hint, self.details)


class OutOfMemoryError(Error, MemoryError):
    """Memory is exhausted."""

    status, name = -1, "GLM52_E_NOMEM"


class InvalidError(Error, ValueError):
    """An argument, option or shape is wrong."""

    status, name = -2, "GLM52_E_INVALID"


class StateError(Error):
    """The call is not allowed now."""

    status, name = -3, "GLM52_E_STATE"


class HandleError(Error, ValueError):
    """The object was closed."""

    status, name = -4, "GLM52_E_HANDLE"


class FileError(Error, OSError):
    """Reading or writing failed; `errno` and `filename` as in OSError."""

    status, name = -5, "GLM52_E_IO"

    def __init__(self, message: str, hint: str = "", details: Optional[Dict[str, str]] = None) -> None:
        super().__init__(message, hint, details)
        code = self.details.get("errno", "")
        self.errno = int(code) if code.isdigit() else None  # type: ignore[assignment]
        self.filename = self.details.get("path")


class CorruptError(Error, ValueError):
    """A file is damaged or malformed."""

    status, name = -6, "GLM52_E_CORRUPT"


class VersionError(Error):
    """Made by or for a newer version."""

    status, name = -7, "GLM52_E_VERSION"


class UnsupportedError(Error, NotImplementedError):
    """Valid, but this build or device cannot do it."""

    status, name = -8, "GLM52_E_UNSUPPORTED"


class DeviceError(Error):
    """The device or its driver failed."""

    status, name = -9, "GLM52_E_DEVICE"


class CommunicationError(Error, ConnectionError):
    """Communication between ranks failed."""

    status, name = -10, "GLM52_E_COMM"


class Cancelled(Error, KeyboardInterrupt):
    """The call was cancelled: by Context.cancel(), or a run of many steps by Ctrl-C.

    It is a KeyboardInterrupt, so that what handles Ctrl-C handles it.
    `history` holds the steps of a run that were done.
    """

    status, name = -11, "GLM52_E_CANCELLED"
    history: Any = None


class TimeoutError_(Error, TimeoutError):
    """Something took too long."""

    status, name = -12, "GLM52_E_TIMEOUT"


class NumericError(Error, ArithmeticError):
    """A loss or gradient is not finite."""

    status, name = -13, "GLM52_E_NUMERIC"


class CallbackError(Error):
    """A callback of the host failed."""

    status, name = -14, "GLM52_E_CALLBACK"


class AgainError(Error, BlockingIOError):
    """Not now; try again."""

    status, name = -15, "GLM52_E_AGAIN"


class InternalError(Error):
    """A defect of the library."""

    status, name = -16, "GLM52_E_INTERNAL"


_CLASSES: Dict[int, Type[Error]] = {
    c.status: c
    for c in (OutOfMemoryError, InvalidError, StateError, HandleError, FileError, CorruptError, VersionError,
              UnsupportedError, DeviceError, CommunicationError, Cancelled, TimeoutError_, NumericError, CallbackError,
              AgainError, InternalError)
}


def make(status: int, message: str, hint: str, details: Dict[str, str]) -> Error:
    """The exception for a failure; called by the extension module."""
    kind = _CLASSES.get(status)
    if kind is None:
        error = Error(message, hint, details)
        error.status, error.name = status, "unknown"
        return error
    return kind(message, hint, details)


def cancelled(message: str) -> Error:
    """The exception for a call that was interrupted before it began; called by the extension module."""
    return Cancelled(message)


def closed(class_name: str) -> Error:
    """The exception for the use of a closed object; called by the extension module."""
    return HandleError(f"this {class_name.replace('glm52.', 'glm52 ')} is closed",
                       "a context closes what was made from it; make it anew")
