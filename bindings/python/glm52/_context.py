"""Context, where everything lives, and Config, the options."""
from __future__ import annotations

import json
import logging
import os
import weakref
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar, Union

from . import _glm52
from ._errors import InvalidError
from ._work import Log, Work

_Self = TypeVar("_Self", bound="Handle")
Options = Mapping[str, Any]


class Handle:
    """What all objects of the library share: they are closed at the end of `with`, by close(),
    or when nobody holds them.

    They keep what they need, so they may die in any order.
    """

    _handle: Any = None
    _work: Work

    def close(self) -> None:
        """Gives the memory back, unless views or other objects still need it. Closing twice is fine."""
        if self._handle is not None:
            _glm52.close(self._handle)

    @property
    def closed(self) -> bool:
        return self._handle is None or bool(_glm52.is_closed(self._handle))

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Any) -> None:
        self.close()

    def _repr(self) -> str:
        return ""

    def __repr__(self) -> str:
        name = f"glm52.{type(self).__name__}"
        return f"<{name}, closed>" if self.closed else f"<{name} {self._repr()}>"


class Memory(NamedTuple):
    """Bytes the library holds through a context now, and at most so far."""

    now: int
    peak: int


class Context(Handle):
    """A device with all that is made on it.

    device   "cpu", "meta" (counts memory and FLOPs, computes nothing), "cuda", "cuda:1", or "auto"
    threads  of the CPU; 0: as many as OpenMP offers
    log      a logging.Logger, a function of (level, text) with the levels of logging, or None for silence. It is
             called by the thread that makes a call, during it or right after it.

    At the end of `with`, or by close(), all that was made from it is closed too; arrays made from views stay valid. Its
    objects may be used by several threads: their calls wait for each other.
    """

    def __init__(self, device: str = "auto", *, threads: int = 0, log: Log = logging.getLogger("glm52")) -> None:
        self._handle = _glm52.context_new(device, threads)
        self._work = Work(self._handle, log)
        self._children: "weakref.WeakSet[Handle]" = weakref.WeakSet()
        self._work.deliver()

    def cancel(self) -> None:
        """Makes the call that runs on this context, or else the next one that can be cancelled, raise Cancelled.
        Any thread."""
        _glm52.context_cancel(self._handle)

    @property
    def device(self) -> str:
        """One line about the device."""
        return str(_glm52.context_describe_device(self._handle))

    @property
    def memory(self) -> Memory:
        return Memory(*_glm52.context_memory(self._handle))

    def close(self) -> None:
        for child in list(self._children):
            child.close()
        self._work.stop()
        super().close()

    def _repr(self) -> str:
        return self.device


class Option(NamedTuple):
    """One option of the schema."""

    key: str
    type: str
    range: str
    default: str
    summary: str


def options(pattern: str = "") -> List[Option]:
    """All options of the library, or those whose key or summary holds `pattern`."""
    every = [Option(*row) for row in _glm52.options()]
    return [o for o in every if pattern in o.key or pattern in o.summary]


def flatten(given: Options, section: str = "") -> Dict[str, Any]:
    """{"train": {"steps": 9}} and {"train.steps": 9} to the latter. Names without a dot get `section`;
    None is left out."""
    flat: Dict[str, Any] = {}
    for key, value in given.items():
        name = str(key)
        if isinstance(value, Mapping):
            flat.update(flatten({f"{name}.{k}": v for k, v in value.items()}))
        elif value is not None:
            flat[f"{section}.{name}" if section and "." not in name and name not in ("out", "device") else name] = value
    return flat


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return ",".join(_text(v) for v in value)
    return str(os.fspath(value) if isinstance(value, os.PathLike) else value)


class Config(Handle):
    """All options, at their defaults or as given.

    glm52.Config(ctx, {"optim.lr": 1e-3}, model={"preset": "tiny"}, train={"steps": 100}); config["optim.lr"] reads
    and sets one. glm52.options() lists them.
    """

    def __init__(self, context: Context, options: Union[Options, str, None] = None, **sections: Any) -> None:
        self.context, self._work = context, context._work
        self._handle = _glm52.config_create(context._handle)
        context._children.add(self)
        if isinstance(options, str):
            self.load_json(options)
        elif options is not None:
            self.update(options)
        self.update(sections)

    @classmethod
    def from_hub(cls, context: Context, path: "Union[str, os.PathLike[str]]", **sections: Any) -> "Config":
        """The model of a hub directory, or of its config.json."""
        config = cls(context, None, **sections)
        config.load_hub(path)
        return config

    def load_hub(self, path: "Union[str, os.PathLike[str]]") -> None:
        """Takes the model section from a hub directory or its config.json. Options that were set win over it."""
        path = os.fspath(path)
        self._work(_glm52.config_load_hub, self._handle,
                   os.path.join(path, "config.json") if os.path.isdir(path) else path)

    def load_json(self, text: str) -> None:
        """Applies a JSON object of options; nothing is changed on failure."""
        _glm52.config_load_json(self._handle, text)

    def update(self, options: Options, section: str = "") -> None:
        """Sets options, given as a nested or flat dict; nothing is changed on failure."""
        flat = flatten(options, section)
        if flat:
            _glm52.config_load_json(self._handle, json.dumps(flat, default=_text))

    def __getitem__(self, key: str) -> Any:
        """Value of an option: int, float, bool, list or str."""
        text = str(_glm52.config_get(self._handle, key))
        return _typed(_kind(key), text)

    def __setitem__(self, key: str, value: Any) -> None:
        _glm52.config_set(self._handle, key, _text(value))

    def __iter__(self) -> Iterator[str]:
        return iter([o.key for o in options()])

    def keys(self) -> List[str]:
        return list(self)

    def items(self) -> List[Tuple[str, Any]]:
        return [(key, self[key]) for key in self]

    def validate(self) -> None:
        """Raises InvalidError for what can be told without taking memory: ranges, shapes, combinations."""
        _glm52.config_validate(self._handle)

    def dump(self, hub: bool = False) -> str:
        """All options as JSON, or the model as a hub config.json."""
        return str(_glm52.config_dump(self._handle, 1 if hub else 0))

    def copy(self) -> "Config":
        return Config(self.context, self.dump())

    def _repr(self) -> str:
        defaults = {o.key: o.default for o in options()}
        changed = [f"{key}={text}" for key in defaults
                   if (text := _glm52.config_get(self._handle, key)) != defaults[key]]
        return ", ".join(changed[:6]) + (f", {len(changed) - 6} more" if len(changed) > 6 else "")


_kinds: Dict[str, str] = {}


def _kind(key: str) -> str:
    if not _kinds:
        _kinds.update((o.key, o.type) for o in options())
    return _kinds.get(key, "string")


def _typed(kind: str, text: str) -> Any:
    if kind == "integer":
        return int(text) if text else None
    if kind == "number":
        return float(text) if text else None
    if kind == "boolean":
        return text == "true"
    if kind == "list":
        return [int(v) if v.lstrip("-").isdigit() else v for v in text.split(",")] if text else []
    return text


def derived(base: Config, options: Options, section: str) -> Config:
    """A copy of `base` with further options; names without a dot are of `section`."""
    config = base.copy()
    config.update(options, section)
    return config


def need_same(context: Context, other: Context, what: str) -> None:
    if context is not other:
        raise InvalidError(f"the {what} belongs to another context", "make both with one context")
