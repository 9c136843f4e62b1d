"""Training: golden trajectory, forms of run(), history, state, stages."""
import math
import os
import subprocess
import tempfile
import unittest

import numpy as np

import glm52
import small


def trajectory_options(about):
    options, muon, adamw = about["options"], about["options"]["muon"], about["options"]["adamw"]
    return {
        "train.microbatch_tokens": 24, "data.pack_tokens": 24, "mtp.depths": options["depths"],
        "mtp.factor": options["mtp_loss_scaling_factor"], "mtp.detach_heads": options["mtp_detach_heads"],
        "mtp.share": "index_kv", "indexer_loss.kind": options["indexer_kl"],
        "indexer_loss.coeff": options["indexer_kl_coeff"], "optim.policy": "glm5",
        "optim.muon_momentum": muon["momentum"], "optim.muon_convention": muon["momentum_convention"],
        "optim.muon_nesterov": muon["nesterov"], "optim.muon_coefficients": muon["coefficient_type"],
        "optim.muon_steps": muon["ns_steps"], "optim.muon_scale": muon["extra_scale"],
        "optim.muon_rope": muon["q_b_rope"], "optim.weight_decay": muon["weight_decay"], "optim.beta1": adamw["beta1"],
        "optim.beta2": adamw["beta2"], "optim.epsilon": adamw["eps"], "train.clip": options["clip_global_norm"],
        "moe.bias_update_rate": options["expert_bias_update_rate"],
        "model.latent_norm_eps": about["config"]["latent_norm_eps"],
        "model.index_k_norm_eps": about["config"]["index_k_norm_eps"],
    }


class Trajectory(unittest.TestCase):
    def test_thirty_steps_are_those_of_the_reference(self):
        golden = small.Golden("trajectory")
        with glm52.Context(threads=1) as context:
            model = glm52.Model.load(context, golden.path + "_model", trajectory_options(golden.about))
            optimizer = glm52.Optimizer(model)
            step = glm52.Step(model, optimizer)
            for n in range(len(golden["loss"])):
                optimizer.set_lr(float(golden["lr"][n]))
                m = step.run(glm52.Batch(context, golden["input_ids"][n], cu_seqlens=golden["cu_seqlens"][n]))
                for name in ("loss", "ce", "grad_norm"):
                    self.assertLess(abs(m[name] - golden[name][n]), golden.tolerance(name), f"{name} of step {n + 1}")
                for d in range(3):
                    self.assertLess(abs(m[f"mtp.{d}.loss"] - golden["mtp_ce"][n, d]), golden.tolerance("mtp_ce"))
            name = "model.layers.3.mlp.experts.2.down_proj.weight"
            error = np.abs(model[name].numpy() - golden["final." + name]).max()
            self.assertLess(error, golden.tolerance("final." + name))


class SameAsC(unittest.TestCase):
    def test_losses_to_the_last_bit(self):
        program = os.path.join(os.environ.get("GLM52_BUILD", ""), "tests", "python", "bench-c-step")
        text = os.path.join(small.SOURCE, "include", "glm52.h")
        if not os.path.exists(program):
            self.skipTest("there is no bench-c-step")
        done = subprocess.run([program, text], input="\n" * 4, capture_output=True, text=True, check=True)
        options = {"data.pack_tokens": 2048, "data.document_tokens": 256, "train.microbatch_tokens": 2048,
                   "data.text": text}
        with glm52.Context("cpu") as context:
            model = glm52.Model(context, options, model={"preset": "tiny"})
            step = glm52.Step(model, glm52.Optimizer(model))
            history = step.run(glm52.Dataset(context, model.config), steps=4, progress=None)
            self.assertEqual(history["loss"], [float(line.split()[2]) for line in done.stdout.splitlines()])


class Running(unittest.TestCase):
    def setUp(self):
        self.context = glm52.Context(threads=1)
        self.addCleanup(self.context.close)

    def test_metrics(self):
        m = small.trainer(self.context)[1].run(small.batch(self.context))
        self.assertEqual((m.step, m["step"], m.loss > 0), (1, 1, True))
        self.assertIn("grad_norm.attention", m)
        self.assertTrue(math.isnan(m["mtp.0.acceptance"]) and "mtp.0.acceptance" not in m)
        with self.assertRaises(KeyError):
            m["nothing"]
        with self.assertRaises(AttributeError):
            m.nothing
        self.assertEqual(len(dict(m)), len(m))
        self.assertRegex(repr(m), r"^<glm52.Metrics step 1, loss ")

    def test_forms_of_run(self):
        step = small.trainer(self.context, train={"microbatches": 2})[1]
        batches = [small.batch(self.context, seed=s) for s in range(3)]
        self.assertIsInstance(step.run(batches[0]), glm52.Metrics)
        self.assertIsInstance(step.run(batches[:2]), glm52.Metrics)
        self.assertEqual(len(step.run((batches[:2] for _ in range(9)), steps=3, progress=None)), 3)
        self.assertEqual(len(step.run(iter(batches), progress=None)), 3)
        self.assertEqual(len(step.run([batches[:2], batches[1:]], steps=5, progress=None)), 2)
        self.assertEqual(len(step.history), 1 + 1 + 3 + 3 + 2)
        with self.assertRaises(glm52.InvalidError):
            step.run(batches)
        with self.assertRaises(glm52.InvalidError):
            step.run(3)
        with self.assertRaises(ValueError):
            step.run(iter(batches), progress="loud")

    def test_exceptions_of_callbacks_propagate(self):
        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)

        def source():
            yield batch
            raise LookupError("no more text")

        with self.assertRaisesRegex(LookupError, "no more text"):
            step.run(source(), steps=5, progress=None)

        def on_step(metrics):
            raise ZeroDivisionError(f"at {metrics.step}")

        with self.assertRaisesRegex(ZeroDivisionError, "at 2"):
            step.run((batch for _ in range(5)), progress=None, on_step=on_step)
        self.assertEqual(len(step.run((batch for _ in range(5)), progress=None, on_step=lambda m: m.step < 4)), 2)

    def test_dataset(self):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("In the beginning was the word. " * 300)
            file.flush()
            data = glm52.Dataset(self.context, text=file.name, pack_tokens=64, document_tokens=32, held_out=0.1)
            model = glm52.Model(self.context, {"model": {**small.SHAPE, "vocab_size": 256},
                                               "train.microbatch_tokens": 64, "data.pack_tokens": 64, "optim.lr": 1e-2,
                                               "optim.schedule": "constant"})
            step = glm52.Step(model, glm52.Optimizer(model))
            before = step.evaluate(data, packs=3)
            history = step.run(data, steps=12, progress=None)
            self.assertLess(step.evaluate(data, packs=3), before)
            self.assertLess(history["loss"][-1], history["loss"][0])
            data.seek(0)
            first = data.next()["tokens"]
            data.seek(0)
            self.assertEqual(next(iter(data))["tokens"].tolist(), first.tolist())
            self.assertGreater(len(data.held_out(5)), 0)
            with self.assertRaisesRegex(glm52.InvalidError, "say how many steps"):
                step.run(data)

    def test_history(self):
        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)
        history = step.run((batch for _ in range(4)), progress=None)
        self.assertEqual(history["step"], [1, 2, 3, 4])
        self.assertEqual(len(history[1:]), 2 + 1)
        self.assertEqual(history[-1].step, 4)
        self.assertIn("loss", history.columns)
        self.assertRegex(repr(history), r"^<glm52.History 4 steps \(1 to 4\), loss ")

    def test_pandas(self):
        try:
            import pandas  # noqa: F401
        except ImportError:
            self.skipTest("there is no pandas")
        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)
        frame = step.run((batch for _ in range(4)), progress=None).to_pandas()
        self.assertEqual(frame.loc[4, "loss"], step.history[-1].loss)
        self.assertEqual(set(step.plan().to_pandas()["section"]), {"memory", "flops"})

    def test_plot(self):
        try:
            import matplotlib
        except ImportError:
            self.skipTest("there is no matplotlib")
        matplotlib.use("Agg")
        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)
        axes = step.run((batch for _ in range(4)), progress=None).plot("loss", "ce", smooth=0.5)
        self.assertEqual(len(axes.lines), 4)
        self.assertEqual(axes.lines[0].get_ydata().tolist() if hasattr(axes.lines[0].get_ydata(), "tolist")
                         else list(axes.lines[0].get_ydata()), step.history["loss"])

    def test_progress(self):
        import contextlib
        import io

        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            step.run((batch for _ in range(4)), steps=4, progress="lines")
        self.assertRegex(out.getvalue(), r"step 1/4  loss [\d.]+ .*\nstep 4/4 ")
        try:
            import tqdm  # noqa: F401
        except ImportError:
            self.skipTest("there is no tqdm")
        with contextlib.redirect_stderr(io.StringIO()) as out:
            step.run((batch for _ in range(4)), steps=4, progress="tqdm")
        self.assertIn("4/4", out.getvalue())

    def test_progress_auto_looks_who_watches(self):
        import sys
        from unittest import mock

        from glm52 import _metrics

        def kind(watched, without_tqdm=False):
            with mock.patch.object(_metrics, "_someone_watches", lambda: watched), mock.patch("sys.stderr"), \
                    mock.patch.dict(sys.modules, {"tqdm": None, "tqdm.auto": None} if without_tqdm else {}):
                progress = _metrics.Progress(4, "auto")
                progress.close()
                return "bar" if progress.bar is not None else "lines" if progress.lines else "nothing"

        self.assertEqual(kind(False), "lines")  # a bar would fill a log with its redrawing
        self.assertEqual(kind(True, without_tqdm=True), "lines")
        try:
            import tqdm  # noqa: F401
        except ImportError:
            self.skipTest("there is no tqdm")
        self.assertEqual(kind(True), "bar")

    def test_recompute_auto_looks_at_free_memory(self):
        from glm52 import _train

        model = small.model(self.context)
        choices, real = {}, _train._free_memory
        try:
            options = glm52.Step(model, glm52.Optimizer(model)).config
            light, none = (_train._peak(options, recompute, True) for recompute in ("light", "none"))
            sizes = {"much": 1e12, "less": (light + none) / 2, "little": 1}
            for name, peak in sizes.items():
                _train._free_memory = lambda peak=peak: (peak - self.context.memory.now) / _train._ROOM
                choices[name] = glm52.Step(model, glm52.Optimizer(model), recompute="auto").config["train.recompute"]
        finally:
            _train._free_memory = real
        self.assertEqual(choices, {"much": "none", "less": "light", "little": "layers"})


class State(unittest.TestCase):
    def setUp(self):
        self.context = glm52.Context(threads=1)
        self.addCleanup(self.context.close)

    def test_save_and_resume(self):
        batches = [small.batch(self.context, seed=s) for s in range(4)]
        with tempfile.TemporaryDirectory() as folder:
            step = small.trainer(self.context)[1]
            for batch in batches[:2]:
                step.run(batch)
            step.save(folder)
            expected = [step.run(batch).loss for batch in batches[2:]]
            other = small.trainer(self.context, train={"seed": 9})[1]
            self.assertEqual(other.resume(folder), 2)
            self.assertEqual([other.run(batch).loss for batch in batches[2:]], expected)

    def test_hub_round_trip(self):
        model = small.model(self.context)
        with tempfile.TemporaryDirectory() as folder:
            model.save(folder)
            again = glm52.Model.load(self.context, folder)
            self.assertEqual(again.config["optim.schedule"], "constant")
            for name, parameter in model.items():
                self.assertTrue((again[name].numpy() == parameter.numpy()).all(), name)
            model.save(folder, dtype="bf16")
            error = glm52.Model.load(self.context, folder)[small.WEIGHT].numpy() / model[small.WEIGHT].numpy() - 1
            self.assertLess(np.abs(error).max(), 2.0**-8)
            with self.assertRaises(glm52.InvalidError):
                model.save(folder, dtype="f16")

    def test_stages(self):
        model, step = small.trainer(self.context, train={"attention": "dense"})
        batch = small.batch(self.context)
        step.run(batch)
        self.assertIn("stage=dense", repr(model))
        view = model[small.WEIGHT].gradient.numpy()
        with self.assertRaisesRegex(glm52.StateError, "views of gradients"):
            step.set_stage(attention="sparse")
        del view
        step.set_stage(attention="dense", train_only="indexer", indexer_loss={"kind": "dense", "coeff": 1.0},
                       stage="warmup")
        self.assertIn("stage=warmup", repr(model))
        before = model[small.WEIGHT].numpy().copy()
        self.assertGreater(step.run(batch)["indexer_loss"], 0)
        self.assertTrue((model[small.WEIGHT].numpy() == before).all())
        with self.assertRaises(glm52.StateError):
            model[small.WEIGHT].gradient
        step.set_stage(attention="sparse", train_only="all", indexer_loss={"kind": "sparse"}, stage="sparse")
        step.run(batch)
        self.assertTrue((model[small.WEIGHT].numpy() != before).any())
        self.assertEqual(model.config["train.stage"], "sparse")
