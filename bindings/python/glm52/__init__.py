"""glm52: trains GLM-5.2.

    import glm52

    with glm52.Context() as ctx:
        model = glm52.Model.load(ctx, "out/tiny")
        opt = glm52.Optimizer(model, lr=2e-4, policy="glm5")
        step = glm52.Step(model, opt, recompute="auto")
        history = step.run(glm52.Dataset(ctx, text="novel.txt"), steps=200)
        model.save("out/hub")

Exceptions are glm52.Error and its subclasses, with .status, .hint and .details. docs/python.md is the guide.
"""
from __future__ import annotations

from . import _glm52
from ._arrays import Tensor
from ._context import Config, Context, Memory, Option, options
from ._data import Batch, Dataset
from ._errors import (AgainError, CallbackError, Cancelled, CommunicationError, CorruptError, DeviceError, Error,
                      FileError, HandleError, InternalError, InvalidError, NumericError, OutOfMemoryError, StateError,
                      TimeoutError_, UnsupportedError, VersionError)
from ._metrics import History, Metrics
from ._model import Model, Parameter
from ._plan import Plan, Row
from ._train import Optimizer, Step

__version__: str = _glm52.version()


def build_info() -> str:
    """One line: compiler, devices and libraries this build knows."""
    return str(_glm52.build_info())


def feature(name: str) -> bool:
    """Whether this build has "cuda", "nccl", "mpi" or "failpoints"."""
    return bool(_glm52.feature(name))


def device_count(kind: str) -> int:
    """How many usable devices of a kind there are."""
    return int(_glm52.context_device_count(kind))


__all__ = [
    "AgainError", "Batch", "CallbackError", "Cancelled", "CommunicationError", "Config", "Context", "CorruptError",
    "Dataset", "DeviceError", "Error", "FileError", "HandleError", "History", "InternalError", "InvalidError",
    "Memory", "Metrics", "Model", "NumericError", "Optimizer", "Option", "OutOfMemoryError", "Parameter", "Plan",
    "Row", "StateError", "Step", "Tensor", "TimeoutError_", "UnsupportedError", "VersionError", "build_info",
    "device_count", "feature", "options",
]
