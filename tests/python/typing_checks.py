"""The types: of the package by mypy --strict, of the stub of the extension by comparison with what is there."""
import ast
import os
import shutil
import subprocess
import sys
import unittest

import glm52
import small

PACKAGE = os.path.dirname(os.path.abspath(glm52.__file__))  # the types of the extension are made by the build


class Types(unittest.TestCase):
    def mypy(self, *paths):
        if not shutil.which("mypy"):
            self.skipTest("there is no mypy")
        done = subprocess.run(["mypy", "--config-file", os.path.join(small.SOURCE, "pyproject.toml"),
                               "--python-executable", sys.executable, "--cache-dir", os.devnull, *paths],
                              capture_output=True, text=True, check=False,
                              cwd=os.path.dirname(PACKAGE))
        return done.returncode, done.stdout + done.stderr

    def test_package(self):
        status, text = self.mypy("glm52")
        self.assertEqual(status, 0, text)

    def test_callers(self):
        """A program that is right passes, one that is wrong does not."""
        import tempfile

        right = ("import glm52\nwith glm52.Context() as c:\n    m = glm52.Model.load(c, 'x')\n"
                 "    s = glm52.Step(m, glm52.Optimizer(m, lr=1e-3))\n"
                 "    loss: float = s.run(glm52.Batch(c, [1])).loss\n"
                 "    h: glm52.History = s.run(glm52.Dataset(c, text='t'), steps=3)\n")
        for text, expected in ((right, 0), (right + "    s.runs()\n", 1), (right + "    m.save(3)\n", 1)):
            with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
                file.write(text)
                file.flush()
                status, message = self.mypy("glm52", file.name)
                self.assertEqual(status, expected, message)

    def test_stub_names_what_is_there(self):
        with open(os.path.join(PACKAGE, "_glm52.pyi"), encoding="utf-8") as file:
            tree = ast.parse(file.read())
        stub = {node.name: len(node.args.args) for node in tree.body if isinstance(node, ast.FunctionDef)}
        constants = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
        there = {name for name in dir(glm52._glm52) if not name.startswith(("_", "SWIG"))}
        self.assertEqual(set(stub) | constants, there)
        for name, count in stub.items():  # too few arguments and too many are refused before anything happens
            for wrong in (count - 1, count + 1):
                if wrong >= 0:
                    with self.assertRaises(TypeError, msg=name):
                        getattr(glm52._glm52, name)(*[None] * wrong)

    def test_every_public_name_has_words(self):
        for name in glm52.__all__:
            thing = getattr(glm52, name)
            self.assertTrue(thing.__doc__, name)
        for kind in (glm52.Context, glm52.Config, glm52.Model, glm52.Batch, glm52.Dataset, glm52.Optimizer, glm52.Step):
            for name, thing in vars(kind).items():
                if (not name.startswith("_") and callable(thing)
                        and name not in ("close", "keys", "items", "copy", "parameters")):
                    self.assertTrue(thing.__doc__, f"{kind.__name__}.{name}")
