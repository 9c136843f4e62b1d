"""What a step measured, and the history of many."""
from __future__ import annotations

import math
import re
import sys
import time
import warnings
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

# Metrics that exist per layer or depth, and only while that part is trained.
_SOMETIMES = re.compile(r"(mtp|indexer_loss|router_load|grad_norm)\.\w+(\.\w+)?$")


class Metrics(Mapping[str, float]):
    """Numbers of one update: m.loss, m["mtp.0.acceptance"]; list(m) names them all.

    A metric of a part that this step does not train is NaN.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Dict[str, float]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> float:
        value = self._values.get(name)
        if value is not None:
            return value
        if _SOMETIMES.match(name):
            return math.nan
        raise KeyError(f"no metric is called {name!r}; there are {', '.join(self._values)}")

    def __getattr__(self, name: str) -> float:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no metric is called {name!r}; list(metrics) names them all") from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __dir__(self) -> List[str]:
        return [*super().__dir__(), *(name for name in self._values if name.isidentifier())]

    def __repr__(self) -> str:
        v = self._values
        return (f"<glm52.Metrics step {v['step']:.0f}, loss {v['loss']:.4f}, grad_norm {v['grad_norm']:.3g}, "
                f"lr {v['lr']:.3g}, {v['tokens_per_second']:.0f} tokens/s>")


class History:
    """Metrics of many updates as columns: history["loss"] is a list, history[-1] the last Metrics."""

    def __init__(self) -> None:
        self.rows: List[Metrics] = []

    def append(self, metrics: Metrics) -> None:
        self.rows.append(metrics)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Metrics]:
        return iter(self.rows)

    @property
    def columns(self) -> List[str]:
        names: Dict[str, None] = {}
        for row in self.rows:
            names.update(dict.fromkeys(row))
        return list(names)

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, int):
            return self.rows[name]
        if isinstance(name, slice):
            part = History()
            part.rows = self.rows[name]
            return part
        return [row[name] for row in self.rows]

    def to_pandas(self) -> Any:
        """A DataFrame with a row per step; needs pandas."""
        import pandas

        frame = pandas.DataFrame([dict(row) for row in self.rows])
        return frame.set_index(frame["step"].astype(int)) if len(frame) else frame

    def plot(self, *names: str, smooth: float = 0.0, ax: Any = None) -> Any:
        """Draws metrics ("loss" by default) over steps and returns the axes; needs matplotlib.

        smooth  0 .. below 1: weight of the past in a running mean, drawn over the values
        """
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(7, 3.5))
        steps = self["step"]
        for name in names or ("loss",):
            values = self[name]
            (line,) = ax.plot(steps, values, label=name, alpha=0.35 if smooth else 1.0, linewidth=1.2)
            if smooth:
                ax.plot(steps, running_mean(values, smooth), color=line.get_color(), linewidth=1.6)
        ax.set_xlabel("step")
        if len(names) > 1:
            ax.legend()
        else:
            ax.set_ylabel(names[0] if names else "loss")
        ax.grid(alpha=0.3)
        return ax

    def __repr__(self) -> str:
        if not self.rows:
            return "<glm52.History, empty>"
        first, last = self.rows[0], self.rows[-1]
        return (f"<glm52.History {len(self.rows)} steps ({first['step']:.0f} to {last['step']:.0f}), "
                f"loss {first['loss']:.4f} to {last['loss']:.4f}>")


def running_mean(values: Sequence[float], weight: float) -> List[float]:
    """Exponential mean without the pull of a first value."""
    mean, total, out = 0.0, 0.0, []
    for value in values:
        if not math.isnan(value):
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        out.append(mean / total if total else math.nan)
    return out


class Progress:
    """Shows a run: a tqdm bar, plain lines, or nothing. "auto": a bar if there is tqdm and someone to watch it,
    else lines."""

    def __init__(self, steps: Optional[int], kind: Any) -> None:
        self.steps, self.bar, self.lines, self.shown = steps, None, kind == "lines", 0.0
        if kind == "tqdm" or (kind in ("auto", True) and _someone_watches()):
            self.bar = _tqdm(steps, kind == "tqdm")
            self.lines = self.bar is None
        elif kind in ("auto", True):
            self.lines = True
        elif kind not in (None, False, "none", "lines"):
            raise ValueError(f"progress is {kind!r}; it must be \"auto\", \"tqdm\", \"lines\" or None")

    def show(self, metrics: Metrics, done: int) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {metrics.loss:.4f}, {metrics.tokens_per_second:.0f} tokens/s",
                                     refresh=False)
            self.bar.update()
        elif self.lines:
            self._line(metrics, done)

    def _line(self, metrics: Metrics, done: int) -> None:
        now = time.monotonic()
        if now - self.shown < 10 and done != self.steps:
            return
        self.shown = now
        print(f"step {done}{f'/{self.steps}' if self.steps else ''}  loss {metrics.loss:.4f}  "
              f"{metrics.tokens_per_second:.0f} tokens/s", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _someone_watches() -> bool:
    """A terminal or a notebook; a bar would fill a log with its redrawing."""
    return "ipykernel" in sys.modules or sys.stderr.isatty()


def _tqdm(steps: Optional[int], needed: bool) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        if needed:
            raise
        return None
    with warnings.catch_warnings():  # a notebook without ipywidgets gets the bar of text
        warnings.simplefilter("ignore")
        return tqdm(total=steps, unit="step", dynamic_ncols=True)
