"""Batch and Dataset."""
from __future__ import annotations

from typing import Any, Iterator, List, Optional, Union

import numpy as np

from . import _glm52
from ._arrays import from_bytes, integers, weights
from ._context import Config, Context, Handle, Options
from ._model import _config_of


class Batch(Handle):
    """One packed row of documents. Arrays are numpy's, of the buffer protocol, DLPack's in host memory, or lists;
    copied.

    tokens      [T] integers, 0 <= id < vocabulary
    cu_seqlens  [documents + 1] integers: first row of each document, and T. Default [0, T]
    labels      [T] integers, -100 for none. Default: the next token of the document
    loss_mask   [T] numbers: weight of each row's loss. Default 1
    row_mask    [T] numbers, 0 for rows that count nowhere else either. Default 1
    """

    def __init__(self, context: Context, tokens: Any = None, *, cu_seqlens: Any = None, labels: Any = None,
                 loss_mask: Any = None, row_mask: Any = None) -> None:
        self.context, self._work = context, context._work
        self._handle = _glm52.batch_create(context._handle)
        context._children.add(self)
        self.set(tokens=tokens, cu_seqlens=cu_seqlens, labels=labels, loss_mask=loss_mask, row_mask=row_mask)

    def set(self, *, tokens: Any = None, cu_seqlens: Any = None, labels: Any = None, loss_mask: Any = None,
            row_mask: Any = None) -> None:
        """Sets fields; new tokens clear all others."""
        fields = {"tokens": tokens, "cu_seqlens": cu_seqlens, "labels": labels, "loss_mask": loss_mask,
                  "row_mask": row_mask}
        for name, value in fields.items():
            if value is not None:
                typed = weights(name, value) if name.endswith("mask") else integers(name, value)
                _glm52.batch_set(self._handle, name, typed)

    def __len__(self) -> int:
        """How many tokens it holds."""
        return int(_glm52.batch_tokens(self._handle)[0])

    @property
    def documents(self) -> int:
        return int(_glm52.batch_tokens(self._handle)[1])

    def __getitem__(self, name: str) -> "np.ndarray[Any, Any]":
        """A copy of a field as set or derived, or of an output of the last forward()."""
        return from_bytes(*_glm52.batch_values(self._handle, name))

    def _repr(self) -> str:
        return f"{len(self)} tokens, {self.documents} documents"


class Dataset(Handle):
    """Packs of a text: a pure function of the seed and their number.

    Dataset(ctx, config), or Dataset(ctx, text="novel.txt", pack_tokens=2048): keywords are options of the data section.
    Iterating goes on for ever, epoch after epoch.
    """

    def __init__(self, context: Context, config: Union[Config, Options, None] = None, **options: Any) -> None:
        sections = {key if "." in key or isinstance(value, dict) else f"data.{key}": value
                    for key, value in options.items()}
        self.context, self._work = context, context._work
        self.config = _config_of(context, config, sections)
        if not self.config["model.vocab_size"]:  # a dataset of bytes needs no more of a model
            self.config["model.preset"] = "tiny"
        self._handle = self._work(_glm52.dataset_open, context._handle, self.config._handle)
        context._children.add(self)

    def next(self, batch: Optional[Batch] = None) -> Batch:
        """The next training pack, in `batch` or in a new one."""
        batch = Batch(self.context) if batch is None else batch
        _glm52.dataset_next(self._handle, batch._handle)  # shorter than the way to the helper thread and back
        return batch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()

    def seek(self, pack: int) -> None:
        """Makes `pack` the number of the next one."""
        _glm52.dataset_seek(self._handle, pack)

    @property
    def held_out_packs(self) -> int:
        """How many packs are kept for evaluation."""
        return int(_glm52.dataset_held_out_packs(self._handle))

    def held_out(self, most: Optional[int] = None) -> List[Batch]:
        """Packs kept for evaluation; at most `most` of them, evenly spread."""
        packs = self.held_out_packs
        count = packs if most is None else min(packs, most)
        batches: List[Batch] = []
        for i in range(count):
            batches.append(Batch(self.context))
            _glm52.dataset_held_out(self._handle, i * packs // count, batches[-1]._handle)
        return batches

    def _repr(self) -> str:
        return str(_glm52.dataset_describe(self._handle))
