"""Arrays in and out: numpy, the buffer protocol and DLPack."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from . import _glm52
from ._errors import InvalidError

# (address, dtype, on_device, shape), as _glm52 shows a tensor
View = Tuple[int, int, int, Tuple[int, ...]]

NAMES: Dict[int, str] = {
    _glm52.DTYPE_F32: "f32", _glm52.DTYPE_BF16: "bf16", _glm52.DTYPE_F64: "f64", _glm52.DTYPE_I32: "i32",
    _glm52.DTYPE_I64: "i64", _glm52.DTYPE_U8: "u8", _glm52.DTYPE_F8_E4M3: "f8_e4m3", _glm52.DTYPE_F16: "f16",
}
_NUMPY: Dict[int, str] = {
    _glm52.DTYPE_F32: "<f4", _glm52.DTYPE_F64: "<f8", _glm52.DTYPE_I32: "<i4", _glm52.DTYPE_I64: "<i8",
    _glm52.DTYPE_U8: "|u1", _glm52.DTYPE_F16: "<f2",
}


def incoming(name: str, value: Any) -> "np.ndarray[Any, Any]":
    """A one-dimensional contiguous array of `value`: an array, a buffer, a DLPack tensor on the CPU, or a list."""
    if not isinstance(value, np.ndarray):
        value = _converted(name, value)
    if value.ndim != 1:
        raise InvalidError(f"{name} has shape {value.shape}, it must have one dimension",
                           "documents are packed into one row; cu_seqlens says where each begins")
    return np.ascontiguousarray(value)


def _converted(name: str, value: Any) -> "np.ndarray[Any, Any]":
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array_interface__"):
        device = value.__dlpack_device__()[0] if hasattr(value, "__dlpack_device__") else 1
        if device not in (1, 3):  # CPU, or host memory that is pinned
            raise InvalidError(f"{name} lies on a device (DLPack type {int(device)}), it must be in host memory",
                               "copy it first: tensor.cpu()")
        return np.from_dlpack(value)
    array = np.asarray(value)
    if array.dtype == object:
        raise InvalidError(f"{name} is a {type(value).__name__}, which is no array of numbers")
    return array


def integers(name: str, value: Any) -> Tuple[int, "np.ndarray[Any, Any]"]:
    """(dtype, array) for fields of ids: int32 and int64 as they are, other integers as int64."""
    array = incoming(name, value)
    if array.dtype.kind not in "iu":
        raise InvalidError(f"{name} has dtype {array.dtype}, it must hold integers")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InvalidError(f"{name} holds {int(array.max())}, which is no token")
    if array.dtype == np.int32:
        return _glm52.DTYPE_I32, array
    return _glm52.DTYPE_I64, array.astype(np.int64, copy=False)


def weights(name: str, value: Any) -> Tuple[int, "np.ndarray[Any, Any]"]:
    """(dtype, array) for masks: booleans and uint8 as they are, other numbers as float32."""
    array = incoming(name, value)
    if array.dtype.kind not in "biuf":
        raise InvalidError(f"{name} has dtype {array.dtype}, it must hold booleans or numbers")
    if array.dtype == np.bool_ or array.dtype == np.uint8:
        return _glm52.DTYPE_U8, array.view(np.uint8)
    return _glm52.DTYPE_F32, array.astype(np.float32, copy=False)


def from_bytes(view: View, values: bytearray) -> "np.ndarray[Any, Any]":
    """An array of its own over a copy that _glm52 made."""
    _, dtype, _, shape = view
    return np.frombuffer(values, dtype=_NUMPY[dtype]).reshape(shape)


class _Memory:
    """What numpy asks for memory of the library; numpy keeps this object, and with it the keeper."""

    def __init__(self, keeper: Any, address: int, kind: str, shape: Tuple[int, ...], read_only: bool) -> None:
        self.keeper = keeper
        self.__array_interface__ = {"data": (address, read_only), "typestr": kind, "shape": shape, "version": 3}


class Tensor:
    """Memory of the library, without a copy. numpy(), np.asarray() and from_dlpack() of any framework take it.

    shape, dtype ("f32", "bf16", ...), read_only. It stays valid whatever else is closed, and shows what the library
    writes there later; nothing guards against reading while a step runs in another thread.
    """

    def __init__(self, keeper: Any, view: View, read_only: bool) -> None:
        self._keeper, self._view, self.read_only = keeper, view, read_only
        self.shape, self.dtype = view[3], NAMES[view[1]]

    def _on_host(self) -> None:
        if self._view[2]:
            raise InvalidError("this tensor lies on a device, numpy sees host memory only", "use from_dlpack()")

    def numpy(self, dtype: Optional[str] = None) -> "np.ndarray[Any, Any]":
        """A view as it is held, or a copy as "f32" or "f64". bf16, which numpy lacks: "f32" converts,
        "u16" shows the bits."""
        self._on_host()
        address, held, _, shape = self._view
        if held == _glm52.DTYPE_BF16:
            bits = np.asarray(_Memory(self._keeper, address, "<u2", shape, self.read_only))
            if dtype in ("u16", "bits"):
                return bits
            if dtype is None:
                raise InvalidError("numpy has no bf16",
                                   "numpy(dtype=\"f32\") converts, numpy(dtype=\"u16\") shows the bits")
            wide: "np.ndarray[Any, Any]" = (bits.astype(np.uint32) << 16).view(np.float32)
            return wide if dtype == "f32" else wide.astype(_named(dtype))
        array: "np.ndarray[Any, Any]" = np.asarray(_Memory(self._keeper, address, _NUMPY[held], shape, self.read_only))
        return array if dtype is None or dtype == self.dtype else array.astype(_named(dtype))

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> "np.ndarray[Any, Any]":
        array = self.numpy("f32") if self.dtype == "bf16" else self.numpy()
        if copy is False and (self.dtype == "bf16" or (dtype is not None and array.dtype != dtype)):
            raise ValueError("a copy is needed")
        array = array if dtype is None else array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (2 if self._view[2] else 1, 0)

    def __dlpack__(self, *, stream: Any = None, max_version: Optional[Tuple[int, int]] = None, dl_device: Any = None,
                   copy: Optional[bool] = None) -> Any:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the tensor lies on device {self.__dlpack_device__()}, not {tuple(dl_device)}")
        if stream is not None and not self._view[2]:
            raise BufferError("a tensor in host memory takes no stream")
        if copy:
            raise BufferError("this tensor is not copied; copy what you made of it")
        versioned = max_version is not None and max_version[0] >= 1
        address, dtype, on_device, shape = self._view
        return _glm52.dlpack(self._keeper, address, dtype, on_device, shape, versioned, self.read_only)

    def __repr__(self) -> str:
        return f"<glm52.Tensor {list(self.shape)} {self.dtype}{', read-only' if self.read_only else ''}>"


def _named(dtype: str) -> str:
    for number, name in NAMES.items():
        if name == dtype and number in _NUMPY:
            return _NUMPY[number]
    raise InvalidError(f"numpy cannot hold dtype {dtype!r}", "use \"f32\" or \"f64\"")


def held_bytes(dtype: int, value: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """`value` as the bytes of a parameter of `dtype`; bf16 rounds to nearest, ties to even."""
    if dtype != _glm52.DTYPE_BF16:
        return np.ascontiguousarray(value, dtype=_NUMPY[dtype])
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FC0), rounded)
