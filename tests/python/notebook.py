"""Runs the code of examples/train.ipynb, cell after cell, where there is no trained model and where there is one."""
import contextlib
import io
import json
import os
import tempfile
import unittest

import glm52
import small


class Notebook(unittest.TestCase):
    def cells(self):
        with open(os.path.join(small.SOURCE, "examples", "train.ipynb"), encoding="utf-8") as file:
            notebook = json.load(file)
        self.assertEqual(notebook["nbformat"], 4)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None),
                                 "clear the outputs before a commit")
        return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]

    def test_without_a_model(self):
        self.run_cells(lambda names: self.assertGreater(names["before"], 5.0))

    def test_with_a_trained_model(self):
        """The first run's model is found where ./run train would leave it, and is better than a random one."""
        with glm52.Context("cpu") as context, tempfile.TemporaryDirectory() as folder:
            with open(folder + "/text", "w", encoding="utf-8") as file:
                file.write("In the beginning was the word, and the word was with all who heard.\n" * 100)
            model = glm52.Model(context, {"data.pack_tokens": 512, "train.microbatch_tokens": 512},
                                model={"preset": "tiny"})
            step = glm52.Step(model, glm52.Optimizer(model, lr=3e-3, warmup=2))
            step.run(glm52.Dataset(context, text=folder + "/text", pack_tokens=512, document_tokens=256, held_out=0),
                     steps=10, progress=None)
            self.run_cells(lambda names: self.assertLess(names["before"], 5.0), model)

    def run_cells(self, check, trained=None):
        try:
            import matplotlib
        except ImportError:
            self.skipTest("there is no matplotlib")
        matplotlib.use("Agg")
        os.environ.setdefault("GLM52_STEPS", "15")
        cells, names, before = self.cells(), {"__name__": "__main__"}, os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            if trained:
                os.makedirs(folder + "/out")
                trained.save(folder + "/out/tiny")
            os.chdir(folder)
            try:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    for number, source in enumerate(cells):
                        exec(compile(source, f"cell {number + 1}", "exec"), names)
            finally:
                os.chdir(before)
            check(names)
            history = names["history"]
            self.assertLess(history["loss"][-1], history["loss"][0])
            self.assertTrue(os.path.exists(os.path.join(folder, "out", "hub", "config.json")))
            self.assertIn("stage=sparse", out.getvalue())
            matplotlib.pyplot.close("all")
