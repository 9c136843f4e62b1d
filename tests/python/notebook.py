"""Runs the code of examples/train.ipynb, cell after cell, where there is no trained model."""
import contextlib
import io
import json
import os
import tempfile
import unittest

import small


class Notebook(unittest.TestCase):
    def cells(self):
        with open(os.path.join(small.SOURCE, "examples", "train.ipynb"), encoding="utf-8") as file:
            notebook = json.load(file)
        self.assertEqual(notebook["nbformat"], 4)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None), "clear the outputs before a commit")
        return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]

    def test_every_cell_runs(self):
        try:
            import matplotlib
        except ImportError:
            self.skipTest("there is no matplotlib")
        matplotlib.use("Agg")
        os.environ.setdefault("GLM52_STEPS", "15")
        cells, names, before = self.cells(), {"__name__": "__main__"}, os.getcwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    for number, source in enumerate(cells):
                        exec(compile(source, f"cell {number + 1}", "exec"), names)
            finally:
                os.chdir(before)
            history = names["history"]
            self.assertLess(history["loss"][-1], history["loss"][0])
            self.assertTrue(os.path.exists(os.path.join(folder, "out", "hub", "config.json")))
            self.assertIn("stage=sparse", out.getvalue())
            matplotlib.pyplot.close("all")
