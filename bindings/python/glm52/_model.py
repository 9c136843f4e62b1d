"""Model and its parameters."""
from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Optional, Tuple, Union

import numpy as np

from . import _glm52
from ._arrays import NAMES, Tensor, View, from_bytes, held_bytes, integers
from ._context import Config, Context, Handle, Options, need_same
from ._errors import InvalidError, StateError

if TYPE_CHECKING:
    from ._data import Batch
    from ._train import Optimizer, Step

Path = Union[str, "os.PathLike[str]"]
Array = "np.ndarray[Any, Any]"
_SAVED = {None: 0, "f32": _glm52.DTYPE_F32, "bf16": _glm52.DTYPE_BF16}


class Parameter:
    """One parameter: name, shape, dtype, value, gradient, and policy: "muon", "adamw" or "none" by the model's config.

    `value` and `gradient` are views without a copy (glm52.Tensor). The value is read-only once an optimizer exists,
    which may hold masters of it: assign() writes it and tells the optimizer.
    """

    def __init__(self, model: "Model", index: int) -> None:
        self.model, self.index = model, index
        self.name, self.policy, self._value, _ = _glm52.model_parameter(model._handle, index)
        self.shape: Tuple[int, ...] = self._value[3]
        self.dtype = NAMES[self._value[1]]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def value(self) -> Tensor:
        return Tensor(_glm52.keep(self.model._handle), self._value, self.model._has_optimizer())

    @property
    def gradient(self) -> Tensor:
        """Gradient of the last run or gradients(), in the type it is kept in (precision.gradients), read-only;
        StateError while no step trains the parameter."""
        view: View = _glm52.model_parameter(self.model._handle, self.index)[3]
        step = self.model._training_step()
        if step is None or not view[0]:
            raise StateError(f"{self.name} has no gradient",
                             "a Step with an Optimizer has them, for what its stage trains")
        return Tensor(_glm52.keep(step._handle), view, True)

    def numpy(self, dtype: Optional[str] = None) -> "np.ndarray[Any, Any]":
        """The value as an array: a view, or a copy in another dtype ("f32" for bf16)."""
        return self.value.numpy(dtype)

    def assign(self, values: Any) -> None:
        """Writes the value, rounded to the parameter's dtype, and has the optimizer take it over."""
        array = np.asarray(values)
        if array.shape != self.shape:
            raise InvalidError(f"{self.name} has shape {list(self.shape)}, the values have {list(array.shape)}")
        _glm52.model_assign(self.model._handle, self.index, held_bytes(self._value[1], array))
        for optimizer in self.model._live_optimizers():
            optimizer.resync()

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> "np.ndarray[Any, Any]":
        return self.value.__array__(dtype, copy)

    def __dlpack__(self, **wishes: Any) -> Any:
        return self.value.__dlpack__(**wishes)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self.value.__dlpack_device__()

    def __repr__(self) -> str:
        return f"<glm52.Parameter {self.name} {list(self.shape)} {self.dtype}>"


class Model(Handle):
    """A GLM-5.2 on a context. Model(ctx, config) begins at random values, Model.load() reads a hub directory.

    model["model.layers.3.self_attn.q_b_proj.weight"] is a parameter; iterating gives their names. `config` is what it
    was made with; further keywords are options ("optim.lr" as **{"optim.lr": ...}, or optim={"lr": ...}).
    """

    def __init__(self, context: Context, config: Union[Config, Options, None] = None, **options: Any) -> None:
        self._begin(context, _config_of(context, config, options))
        self._handle = self._work(_glm52.model_create, context._handle, self.config._handle)

    @classmethod
    def load(cls, context: Context, directory: Path, config: Union[Config, Options, None] = None,
             **options: Any) -> "Model":
        """Reads a hub directory (config.json, safetensors). The model section of `config` yields to the directory's.

        Without a config, the learning rate of its optimizers is constant after warm-up unless they are told otherwise.
        """
        self = cls.__new__(cls)
        base = Config(context, None if config else {"optim.schedule": "constant"})
        if isinstance(config, Config):
            need_same(context, config.context, "config")
            base.update({key: value for key, value in config.items()
                         if not key.startswith("model.") and value is not None})
        elif config is not None:
            base.update(config)
        base.update(options)
        base.load_hub(directory)
        self._begin(context, base)
        self._handle = self._work(_glm52.model_load, context._handle, base._handle, os.fspath(directory))
        return self

    def _begin(self, context: Context, config: Config) -> None:
        self.context, self.config, self._work = context, config, context._work
        self._optimizers: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
        self._steps: "weakref.WeakSet[Step]" = weakref.WeakSet()
        context._children.add(self)

    def save(self, directory: Path, dtype: Optional[str] = None) -> None:
        """Writes a hub directory, in "f32" or "bf16", or as held. Files there are replaced whole or not at all."""
        if dtype not in _SAVED:
            raise InvalidError(f"dtype is {dtype!r}; a model is saved as \"f32\", \"bf16\" or None (as held)")
        self._work(_glm52.model_save, self._handle, os.fspath(directory), _SAVED[dtype])

    # ---- parameters

    def __len__(self) -> int:
        """How many parameters (tensors) there are."""
        return int(_glm52.model_parameter_count(self._handle)[0])

    @property
    def size(self) -> int:
        """Elements of all parameters."""
        return int(_glm52.model_parameter_count(self._handle)[1])

    def __getitem__(self, name: Union[str, int]) -> Parameter:
        if isinstance(name, str):
            try:
                name = int(_glm52.model_parameter_find(self._handle, name))
            except InvalidError as error:
                raise KeyError(error.message) from None
        elif not -len(self) <= name < len(self):
            raise IndexError(f"parameter {name} does not exist, the model has {len(self)}")
        return Parameter(self, name % len(self))

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and _glm52.model_parameter_find(self._handle, name) is not None
        except InvalidError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter([_glm52.model_parameter(self._handle, i)[0] for i in range(len(self))])

    def keys(self) -> List[str]:
        return list(self)

    def parameters(self) -> List[Parameter]:
        return [Parameter(self, i) for i in range(len(self))]

    def items(self) -> List[Tuple[str, Parameter]]:
        return [(p.name, p) for p in self.parameters()]

    def _live_optimizers(self) -> List["Optimizer"]:
        return [o for o in self._optimizers if not o.closed]

    def _has_optimizer(self) -> bool:
        return bool(self._live_optimizers())

    def _training_step(self) -> Optional["Step"]:
        return next((s for s in self._steps if not s.closed and s.optimizer is not None), None)

    # ---- looking inside

    def forward(self, batch: "Batch", outputs: Union[str, Iterable[str]] = "loss") -> Dict[str, "np.ndarray[Any, Any]"]:
        """Runs the model without gradients and returns what `outputs` names, as arrays.

        logits, ce_rows, loss, final_hidden, and with a layer's number or * (all layers) hidden., topk. (selected
        keys, -1 padded), index_scores., router_logits., router_idx., router_w.; per MTP depth mtp_logits.,
        mtp_ce_rows. and others.
        """
        names = outputs.split() if isinstance(outputs, str) else list(outputs)
        self._work(_glm52.model_forward, self._handle, batch._handle, " ".join(names))
        found: Dict[str, "np.ndarray[Any, Any]"] = {}
        for name in names:
            for one in self._expand(name):
                try:
                    found[one] = from_bytes(*_glm52.batch_values(batch._handle, one))
                except InvalidError:
                    if one == name:
                        raise
        return found

    def _expand(self, name: str) -> List[str]:
        if not name.endswith("*"):
            return [name]
        stems = ["logits", "loss", "ce_rows", "final_hidden", "tv_rows"]
        per_layer = ["hidden.", "topk.", "index_scores.", "router_logits.", "router_idx.", "router_w.", "mtp_logits.",
                     "mtp_out.", "mtp_ce_rows.", "mtp_topk.", "mtp_hidden.", "mtp_index_scores.", "mtp_router_logits.",
                     "mtp_router_idx.", "mtp_router_w.", "mtp_alpha."]
        layers = max(int(self.config["model.num_hidden_layers"]), 16)
        every = stems + [f"{stem}{i}" for stem in per_layer for i in range(layers)]
        return [one for one in every if one.startswith(name[:-1])]

    def generate(self, prompt: Any, tokens: int = 100, *, temperature: float = 0.0,
                 seed: int = 0) -> "np.ndarray[Any, Any]":
        """Continues token ids (or the bytes of a text) by up to `tokens`; temperature 0 takes the likeliest."""
        if isinstance(prompt, str):
            prompt = prompt.encode()
        if isinstance(prompt, (bytes, bytearray)):
            prompt = np.frombuffer(prompt, dtype=np.uint8)
        ids = integers("prompt", prompt)[1]
        if ids.size and not -2**31 <= int(ids.min()) <= int(ids.max()) < 2**31:
            raise InvalidError("the prompt holds ids beyond 32 bits")
        if tokens < 0:
            raise InvalidError(f"tokens is {tokens}, must be 0 or more")
        new = self._work(_glm52.model_generate, self._handle, ids.astype(np.int32), tokens, temperature, seed)
        return np.frombuffer(new, dtype=np.int32)

    def sample(self, prompt: str, tokens: int = 100, *, temperature: float = 0.8, seed: int = 0) -> str:
        """A text continued by a model of bytes, prompt included."""
        new = self.generate(prompt, tokens, temperature=temperature, seed=seed)
        return prompt + bytes(int(t) for t in new if 0 <= t < 256).decode("utf-8", "replace")

    def _repr(self) -> str:
        text = str(_glm52.model_describe(self._handle))
        return text.replace(" parameters", "").replace("stage ", "stage=")


def _config_of(context: Context, config: Union[Config, Options, None], options: Options) -> Config:
    if isinstance(config, Config):
        need_same(context, config.context, "config")
        made = config.copy()
    else:
        made = Config(context, config)
    made.update(options)
    return made
