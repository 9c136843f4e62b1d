"""What a call costs from Python. Getters of a C struct's worth must stay below two microseconds (best of many runs, for the
machine may be busy)."""
import timeit
import unittest

import glm52
import small


class Overhead(unittest.TestCase):
    def test_getters(self):
        with glm52.Context(threads=1) as context:
            model, step = small.trainer(context)
            batch = small.batch(context)
            metrics = step.run(batch)
            calls = {"context.memory": lambda: context.memory, "len(batch)": lambda: len(batch), "metrics.loss": lambda: metrics.loss,
                     "step.metric('loss')": lambda: step.metric("loss"), "model.size": lambda: model.size,
                     "batch.closed": lambda: batch.closed, "config_get": lambda: step.config._handle and
                     glm52._glm52.config_get(step.config._handle, "optim.lr")}
            for name, call in calls.items():
                best = min(timeit.repeat(call, number=2000, repeat=15)) / 2000 * 1e6
                print(f"# {name}: {best:.2f} us")
                self.assertLess(best, 2.0, name)
