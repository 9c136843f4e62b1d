"""Optimizer and Step."""
from __future__ import annotations

import os
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Union, overload

from . import _glm52
from ._context import Config, Context, Handle, Options, derived, need_same
from ._data import Batch, Dataset
from ._errors import Cancelled, InvalidError, StateError
from ._metrics import History, Metrics, Progress
from ._model import Model, Path
from ._plan import Plan, Row

Data = Union[Dataset, Iterable[Union[Batch, Sequence[Batch]]]]
# "auto" keeps activations if the plan's peak is within this share of the memory that is free.
_ROOM = 0.8


class Optimizer(Handle):
    """State of the parameters that are trained, and how they are updated.

    lr        learning rate after warm-up
    policy    "adamw", or "glm5": Muon per head for matrices, AdamW for the rest
    schedule  "constant", "cosine", "linear" or "wsd"
    Further keywords are options of the optim section: Optimizer(model, lr=2e-4, warmup=20, weight_decay=0.1). What is
    not given comes from the config of the model.
    """

    def __init__(self, model: Model, config: Optional[Config] = None, *, lr: Optional[float] = None,
                 policy: Optional[str] = None, schedule: Optional[str] = None, **options: Any) -> None:
        given = {"lr": lr, "policy": policy, "schedule": schedule, **options}
        self.model, self._work = model, model._work
        self.config = derived(config or model.config, given, "optim")
        self._handle = self._work(_glm52.optimizer_create, model._handle, self.config._handle)
        model.context._children.add(self)
        model._optimizers.add(self)

    def set_lr(self, lr: Optional[float]) -> None:
        """The learning rate from the next step on; None returns to the schedule."""
        if lr is not None and lr < 0:
            raise InvalidError(f"learning rate {lr} is negative")
        _glm52.optimizer_set_lr(self._handle, -1.0 if lr is None else lr)

    def resync(self) -> None:
        """Takes the masters anew from the parameters, after they were written through a view."""
        self._work(_glm52.optimizer_resync, self._handle)

    def _repr(self) -> str:
        return f"{self.config['optim.policy']}, lr={self.config['optim.lr']:g}, {self.config['optim.schedule']}"


class Step(Handle):
    """The training step: made once, with all memory it will need, then run.

    recompute  "auto": keeps activations if they fit into the memory that is free; "none", "light", "layers"
    Further keywords are options of the train section: Step(model, opt, microbatches=4, microbatch_tokens=4096,
    clip=1.0). optimizer=None is for evaluation only. `history` holds the metrics of all updates so far.
    """

    def __init__(self, model: Model, optimizer: Optional[Optimizer] = None, config: Optional[Config] = None, *,
                 recompute: Optional[str] = None, **options: Any) -> None:
        self.model, self.optimizer, self._work = model, optimizer, model._work
        base = config or (optimizer.config if optimizer else model.config)
        self.config = derived(base, options, "train")
        if recompute == "auto":
            recompute = _least_recompute(self.config, optimizer is not None, model.context)
        if recompute is not None:
            self.config["train.recompute"] = recompute
        self._handle = self._work(_glm52.step_create, model._handle, optimizer._handle if optimizer else None,
                                  self.config._handle)
        self.history = History()
        self._names: List[str] = []
        model.context._children.add(self)
        model._steps.add(self)

    # ---- running

    def plan(self) -> Plan:
        """Memory by class and FLOPs by operation of a step with full microbatches; the first call makes a dry run."""
        return Plan([Row(*row) for row in self._work(_glm52.step_plan, self._handle)])

    @overload
    def run(self, data: Union[Batch, Sequence[Batch]]) -> Metrics: ...  # type: ignore[misc]
    @overload
    def run(self, data: Data, steps: Optional[int] = ..., *, progress: Any = ...,
            on_step: Optional[Callable[[Metrics], Any]] = ...) -> History: ...

    def run(self, data: Any, steps: Optional[int] = None, *, progress: Any = "auto",
            on_step: Optional[Callable[[Metrics], Any]] = None) -> Union[Metrics, History]:
        """Trains.

        run(batch), run([batch, ...])   one update over these microbatches; returns its Metrics
        run(dataset, steps=200)         many updates of train.microbatches packs each; returns their History
        run(iterable, steps=200)        the same with an iterable (a generator, say) of batches or lists of batches;
                                        it may also end earlier
        progress is "auto" (tqdm in a terminal or notebook, plain lines elsewhere or without tqdm), "tqdm", "lines" or
        None.
        on_step gets the Metrics of each update; when it returns False the run ends. What it or the iterable raises
        goes on to the caller.
        Ctrl-C raises Cancelled, a KeyboardInterrupt: parameters and optimizer are then as after the last whole update.
        """
        if isinstance(data, Batch):
            return self._update([data])
        if isinstance(data, (list, tuple)) and steps is None and all(isinstance(one, Batch) for one in data):
            return self._update(data)
        if isinstance(data, Dataset):
            if steps is None:
                raise InvalidError("a dataset never ends: say how many steps", "step.run(dataset, steps=200)")
            data = self._groups(data)
        if not isinstance(data, Iterable):
            raise InvalidError("step.run takes batches, a dataset or an iterable of batches, not "
                               f"{type(data).__name__}")
        return self._loop(iter(data), steps, Progress(steps, progress), on_step)

    def _update(self, batches: Sequence[Batch]) -> Metrics:
        self._work(_glm52.step_run, self._handle, [batch._handle for batch in batches])
        metrics = self.metrics
        self.history.append(metrics)
        return metrics

    def _groups(self, dataset: Dataset) -> Iterator[Sequence[Batch]]:
        batches = [Batch(self.model.context) for _ in range(int(self.config["train.microbatches"]))]
        while True:
            yield [dataset.next(batch) for batch in batches]

    def _loop(self, source: Iterator[Any], steps: Optional[int], progress: Progress,
              on_step: Optional[Callable[[Metrics], Any]]) -> History:
        done, before = History(), self.metric("step")
        try:
            while steps is None or len(done) < steps:
                group = next(source, None)
                if group is None:
                    break
                done.append(self._update([group] if isinstance(group, Batch) else group))
                progress.show(done[-1], len(done))
                if on_step is not None and on_step(done[-1]) is False:
                    break
        except KeyboardInterrupt as error:
            self._catch_up(done, before)
            stopped = Cancelled(f"stopped after {len(done)}{f' of {steps}' if steps else ''} steps",
                                "model and optimizer are as after the last of them; run() again goes on")
            stopped.history = done
            raise stopped from (error if isinstance(error, Cancelled) else None)
        finally:
            progress.close()
        return done

    def _catch_up(self, done: History, before: float) -> None:
        """Notes the update that was over when a signal came, and not yet noted."""
        if self.metric("step") > (done[-1].step if done else before):
            done.append(self.metrics)
            if not self.history or self.history[-1].step < done[-1].step:
                self.history.append(done[-1])

    def gradients(self, batches: Union[Batch, Sequence[Batch]]) -> Metrics:
        """Forward and backward without the update: model[name].gradient shows what came out."""
        self._work(_glm52.step_gradients, self._handle, _handles(batches))
        return self.metrics

    def evaluate(self, data: Union[Batch, Sequence[Batch], Dataset], packs: Optional[int] = 32) -> float:
        """Mean loss over all labelled tokens; of a dataset, over at most `packs` held-out packs (None: all)."""
        if isinstance(data, Dataset):
            data = data.held_out(packs)
            if not data:
                raise InvalidError("the dataset keeps nothing for evaluation", "open it with data.held_out above 0")
        return float(self._work(_glm52.step_evaluate, self._handle, _handles(data)))

    # ---- measurements

    @property
    def metrics(self) -> Metrics:
        """Of the last run."""
        if not self._names:
            name = _glm52.step_metric_name(self._handle, 0)
            while name is not None:
                self._names.append(name)
                name = _glm52.step_metric_name(self._handle, len(self._names))
        return Metrics({name: _glm52.step_metric(self._handle, name) for name in self._names})

    def metric(self, name: str) -> float:
        """One number of the last run."""
        return float(_glm52.step_metric(self._handle, name))

    # ---- state

    def save(self, directory: Path) -> None:
        """Writes model, optimizer state and counters; the previous state there survives a failure."""
        self._work(_glm52.step_save, self._handle, os.fspath(directory))

    def resume(self, directory: Path, dataset: Optional[Dataset] = None) -> int:
        """Takes all that from a directory that save() wrote, and seeks the dataset.
        Returns the number of its next pack."""
        packs = int(self._work(_glm52.step_resume, self._handle, os.fspath(directory)))
        if dataset is not None:
            dataset.seek(packs)
        return packs

    def set_stage(self, config: Optional[Config] = None, **options: Any) -> None:
        """Goes on under other options of the same model:
        step.set_stage(stage="sparse", indexer_loss={"kind": "sparse"}).

        Keywords are options of the train section, or whole sections. Optimizer state of parameters trained before and
        after is kept; other state begins at zero. Arrays over gradients must be gone: their memory moves.
        """
        if _glm52.kept_gradients(self._handle):
            raise StateError("views of gradients are alive, and a stage moves the gradients",
                             "copy what you need (array.copy()) and delete the views")
        if config is not None:
            need_same(self.model.context, config.context, "config")
        following = derived(config or self.config, options, "train")
        self._work(_glm52.step_set_stage, self._handle, following._handle)
        self.config, self._names = following, []
        self.model.config = following.copy()

    def _repr(self) -> str:
        done = f"step {self.metric('step'):.0f}" if self.optimizer else "evaluation only"
        return (f"{done}, {self.config['train.microbatches']} x {self.config['train.microbatch_tokens']} tokens, "
                f"recompute={self.config['train.recompute']}")


def _handles(data: Union[Batch, Sequence[Batch]]) -> List[Any]:
    return [data._handle] if isinstance(data, Batch) else [batch._handle for batch in data]


def _least_recompute(config: Config, trains: bool, context: Context) -> str:
    """What must be computed anew for a step to fit into free memory, by dry runs on the meta device."""
    free = _free_memory()
    for recompute in ("none", "light"):
        if free is None or _peak(config, recompute, trains) - context.memory.now <= _ROOM * free:
            return recompute
    return "layers"


def _peak(config: Config, recompute: str, trains: bool) -> int:
    with Context("meta", log=None) as meta:
        options: Dict[str, Any] = {"train.recompute": recompute, "out": ""}
        other = Config(meta, config.dump())
        other.update(options)
        other["model.hub"] = ""
        model = Model(meta, other)
        optimizer = Optimizer(model, other) if trains else None
        return Step(model, optimizer, other).plan().peak


def _free_memory() -> Optional[int]:
    """Bytes of host memory that programs can still take, or None where nobody tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
