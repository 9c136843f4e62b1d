"""Lifetimes, closing, reprs, configs, errors."""
import errno
import gc
import itertools
import logging
import os
import pickle
import tempfile
import unittest

import numpy as np

import glm52
import small


class Lifetimes(unittest.TestCase):
    def test_objects_die_in_any_order(self):
        for order in itertools.permutations(range(5)):
            context = glm52.Context(threads=1)
            model = small.model(context)
            optimizer = glm52.Optimizer(model)
            step = glm52.Step(model, optimizer)
            view = model[small.WEIGHT].numpy()
            objects = [context, model, optimizer, step, view]
            before = float(view.sum())
            del context, model, optimizer, step, view
            for i in order:
                objects[i] = None
                gc.collect(0)
                if objects[4] is not None:
                    self.assertEqual(float(objects[4].sum()), before)

    def test_objects_close_in_any_order(self):
        for order in itertools.permutations(range(4)):
            context = glm52.Context(threads=1)
            model, step = small.trainer(context)
            gradient = model[small.WEIGHT].gradient.numpy()
            view = model[small.WEIGHT].numpy()
            objects = [context, model, step.optimizer, step]
            for i in order:
                objects[i].close()
                objects[i].close()
                self.assertTrue(objects[i].closed)
            self.assertTrue(np.isfinite(view).all() and not gradient.any())

    def test_context_closes_what_was_made_from_it(self):
        with glm52.Context(threads=1) as context:
            model, step = small.trainer(context)
            batch = small.batch(context)
            view = model[small.WEIGHT].numpy()
        for call in (model.keys, lambda: step.run(batch), lambda: len(batch), lambda: context.device,
                     lambda: step.metrics, lambda: small.config(context)):
            with self.assertRaises(glm52.HandleError) as caught:
                call()
            self.assertIn("closed", str(caught.exception))
        self.assertEqual(repr(model), "<glm52.Model, closed>")
        self.assertTrue(np.isfinite(view).all())

    def test_views_keep_their_memory_alone(self):
        context = glm52.Context(threads=1)
        model, step = small.trainer(context)
        step.gradients(small.batch(context))
        gradient = model[small.WEIGHT].gradient.numpy()
        expected = gradient.copy()
        step.close(), step.optimizer.close(), model.close(), context.close()
        del step, model, context
        gc.collect()
        self.assertTrue((gradient == expected).all() and expected.any())

    def test_failed_construction_leaves_nothing(self):
        with glm52.Context(threads=1) as context:
            before = context.memory.now
            for _ in range(50):
                with self.assertRaises(glm52.InvalidError):
                    small.model(context, optim={"schedule": "sometimes"})
                with self.assertRaises(glm52.InvalidError):
                    glm52.Batch(context, tokens=[1, 2, 3], cu_seqlens=[0, 9])
            gc.collect()
            self.assertLess(context.memory.now - before, 4096)


class Leaks(unittest.TestCase):
    def resident(self):
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def check(self, work, times=10000, allowed=2 << 20):
        for _ in range(times // 10):
            work()
        before = self.resident()
        for _ in range(times):
            work()
        self.assertLess(self.resident() - before, allowed)

    def test_handles_errors_and_views(self):
        with glm52.Context(threads=1) as context:
            model = small.model(context)
            ids = small.tokens()
            before = context.memory.now

            def work():
                glm52.Batch(context, ids, loss_mask=np.ones(40))
                np.from_dlpack(model[small.WEIGHT])
                model[small.WEIGHT].numpy()
                model[small.WEIGHT].__dlpack__(max_version=(1, 0))
                try:
                    model["nothing"]
                except KeyError:
                    pass

            self.check(work)
            gc.collect()
            self.assertLess(context.memory.now - before, 65536)

    def test_contexts_and_configs(self):
        def work():
            with glm52.Context(threads=1) as context:
                glm52.Config(context, {"optim.lr": 1e-3})

        self.check(work)

    def test_runs(self):
        with glm52.Context(threads=1) as context:
            step = small.trainer(context)[1]
            batch = small.batch(context, 8)

            def work():
                step.run(batch)
                step.history.rows.clear()

            self.check(work, 1000 if small.sanitized() else 10000)


class Configs(unittest.TestCase):
    def setUp(self):
        self.context = glm52.Context(threads=1)

    def test_ways_to_say_options(self):
        config = glm52.Config(self.context, {"optim.lr": 1e-3, "train": {"steps": 7}}, model={"preset": "tiny"})
        config["train.clip"] = 0.5
        self.assertEqual((config["optim.lr"], config["train.steps"], config["train.clip"]), (1e-3, 7, 0.5))
        self.assertEqual((config["model.preset"], config["model.norm_topk_prob"]), ("tiny", True))
        self.assertEqual(small.config(self.context)["model.indexer_types"], ["full", "full", "shared", "full"])
        config.validate()
        again = config.copy()
        self.assertEqual(again.dump(), config.dump())
        self.assertIn("\"model_type\"", config.dump(hub=True))
        self.assertEqual([o.key for o in glm52.options("optim.lr")], ["optim.lr"])
        self.assertEqual(dict(config.items())["optim.lr"], 1e-3)

    def test_mistakes_say_what_to_do(self):
        with self.assertRaises(ValueError) as caught:
            glm52.Config(self.context, optim={"shedule": "cosine"})
        error = caught.exception
        self.assertIsInstance(error, glm52.Error)
        self.assertEqual((error.status, error.name), (-2, "GLM52_E_INVALID"))
        self.assertEqual(error.details["key"], "optim.shedule")
        self.assertIn("did you mean optim.schedule?", str(error))
        with self.assertRaises(ValueError):
            glm52.Config(self.context)["optim.lr"] = "a\0b"

    def test_optimizer_and_step_name_their_sections(self):
        model = small.model(self.context)
        with self.assertRaisesRegex(glm52.InvalidError, "optim.momentums: no such option"):
            glm52.Optimizer(model, momentums=1)
        step = glm52.Step(model, glm52.Optimizer(model, lr=0.5, policy="glm5"), recompute="layers", microbatches=3)
        self.assertEqual((step.config["optim.lr"], step.config["train.microbatches"]), (0.5, 3))
        self.assertEqual(step.config["train.recompute"], "layers")
        with self.assertRaises(glm52.StateError):
            glm52.Step(model, glm52.Optimizer(model), attention="dense")


class Errors(unittest.TestCase):
    def test_classes_are_also_builtins(self):
        for kind, builtin in ((glm52.InvalidError, ValueError), (glm52.OutOfMemoryError, MemoryError),
                              (glm52.FileError, OSError), (glm52.Cancelled, KeyboardInterrupt),
                              (glm52.TimeoutError_, TimeoutError), (glm52.UnsupportedError, NotImplementedError)):
            error = kind("what", "do this", {"key": "k"})
            self.assertTrue(issubclass(kind, builtin) and issubclass(kind, RuntimeError))
            self.assertEqual(str(error), "what\n  do this")
            again = pickle.loads(pickle.dumps(error))
            self.assertEqual((type(again), again.hint, again.details), (kind, "do this", {"key": "k"}))

    def test_files(self):
        with glm52.Context(threads=1) as context:
            with self.assertRaises(OSError) as caught:
                glm52.Model.load(context, "/nonexistent/model")
            self.assertEqual(caught.exception.errno, errno.ENOENT)
            self.assertIn("/nonexistent/model", caught.exception.filename)
            with tempfile.TemporaryDirectory() as folder:
                with open(folder + "/config.json", "w", encoding="utf-8") as file:
                    file.write("{")
                with self.assertRaises(glm52.CorruptError):
                    glm52.Model.load(context, folder)

    def test_devices(self):
        with self.assertRaises(glm52.InvalidError):
            glm52.Context("gpu")
        if not glm52.feature("cuda"):
            with self.assertRaises(NotImplementedError):
                glm52.Context("cuda")
        self.assertEqual(glm52.device_count("cpu"), 1)

    def test_other_contexts_are_refused(self):
        one, other = glm52.Context(threads=1), glm52.Context(threads=1)
        with self.assertRaisesRegex(glm52.InvalidError, "another context"):
            glm52.Model(one, small.config(other))
        step = small.trainer(one)[1]
        with self.assertRaises(TypeError):
            glm52._glm52.step_run(step._handle, [step._handle])


class Log(unittest.TestCase):
    def foreign_key(self, context):
        """A config.json with a key that glm52 does not know: it is logged."""
        import json

        text = json.loads(small.config(context).dump(hub=True))
        text["something_new"] = 1
        folder = tempfile.mkdtemp()
        with open(folder + "/config.json", "w", encoding="utf-8") as file:
            json.dump(text, file)
        return folder

    def test_messages_reach_logging(self):
        with glm52.Context(threads=1) as context:
            with self.assertLogs("glm52", logging.INFO) as logs:
                glm52.Config.from_hub(context, self.foreign_key(context))
            self.assertIn("something_new", logs.output[0])

    def test_exceptions_of_a_log_function_reach_the_caller(self):
        def log(level, text):
            raise RuntimeError(f"log: {text}")

        with glm52.Context("cpu", threads=1, log=log) as context:
            folder = self.foreign_key(context)
            with self.assertRaisesRegex(RuntimeError, "log: .*something_new"):
                glm52.Config.from_hub(context, folder)


class Reprs(unittest.TestCase):
    def test_everything_says_what_it_is(self):
        with glm52.Context(threads=1) as context:
            model, step = small.trainer(context)
            self.assertRegex(repr(context), r"^<glm52.Context cpu, 1 threads>$")
            self.assertRegex(repr(model), r"^<glm52.Model 4 layers \(1 dense \+ 3 MoE\), [\d.]+[KM], stage=sparse>$")
            self.assertEqual(repr(step.optimizer), "<glm52.Optimizer adamw, lr=0.01, constant>")
            self.assertEqual(repr(step), "<glm52.Step step 0, 1 x 64 tokens, recompute=none>")
            self.assertEqual(repr(small.batch(context)), "<glm52.Batch 40 tokens, 2 documents>")
            self.assertEqual(repr(model[small.WEIGHT]), f"<glm52.Parameter {small.WEIGHT} [30, 14] f32>")
            self.assertEqual(repr(model[small.WEIGHT].value), "<glm52.Tensor [30, 14] f32, read-only>")
            plan = step.plan()
            self.assertIn("memory  parameters", repr(plan))
            self.assertIn("<table>", plan._repr_html_())
            self.assertGreater(plan.flops, 0)
            self.assertGreaterEqual(plan.peak, plan.memory["parameters"])
