"""What calls cost from Python: getters of a C struct's worth below two microseconds (best of many runs, for the machine
may be busy), and around the library's own time for a training step less than 1 % of it. tests/bench/python_step.py
measures against a C program."""
import statistics
import time
import timeit
import unittest

import numpy as np

import glm52
import small


class Overhead(unittest.TestCase):
    def test_getters(self):
        with glm52.Context(threads=1) as context:
            model, step = small.trainer(context)
            batch = small.batch(context)
            metrics = step.run(batch)
            calls = {"context.memory": lambda: context.memory, "len(batch)": lambda: len(batch),
                     "metrics.loss": lambda: metrics.loss, "step.metric('loss')": lambda: step.metric("loss"),
                     "model.size": lambda: model.size, "batch.closed": lambda: batch.closed,
                     "config_get": lambda: step.config._handle and
                     glm52._glm52.config_get(step.config._handle, "optim.lr")}
            for name, call in calls.items():
                best = min(timeit.repeat(call, number=500, repeat=100)) / 500 * 1e6
                print(f"# {name}: {best:.2f} us")
                self.assertLess(best, 2.0, name)

    def test_a_step(self):
        with glm52.Context("cpu") as context:
            options = {"train.microbatch_tokens": 2048, "data.pack_tokens": 2048}
            model = glm52.Model(context, options, model={"preset": "tiny"})
            step = glm52.Step(model, glm52.Optimizer(model))
            batch = glm52.Batch(context, np.arange(2048) % 256, cu_seqlens=range(0, 2049, 256))
            around, inside, last = [], [], [time.monotonic()]

            def on_step(metrics):
                around.append(time.monotonic() - last[0] - metrics["seconds"])
                inside.append(metrics["seconds"])
                last[0] = time.monotonic()

            step.run((batch for _ in range(11)), progress=None, on_step=on_step)
            share = statistics.median(around) / statistics.median(inside)
            print(f"# around a step of {1e3 * statistics.median(inside):.1f} ms: "
                  f"{1e6 * statistics.median(around):.0f} us, {100 * share:.3f} %")
            self.assertLess(share, 0.01)
