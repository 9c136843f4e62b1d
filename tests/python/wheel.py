"""The wheel, built by meson-python and installed in a fresh venv."""
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

import small

PROGRAM = """
import glm52, numpy as np
with glm52.Context(threads=1) as context:
    model = glm52.Model(context, model={"preset": "tiny"}, train={"microbatch_tokens": 64}, data={"pack_tokens": 64})
    step = glm52.Step(model, glm52.Optimizer(model))
    losses = [step.run(glm52.Batch(context, np.arange(64))).loss for _ in range(3)]
assert losses[2] < losses[0], losses
print(glm52.__file__)
"""


def run_quietly(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode:
        raise AssertionError(f"{command}: {done.stdout[-4000:]}")
    return done.stdout


# Any warning fails, but for one of SWIG 4.2 and 4.3 about its own types under Python 3.12.
STRICT = ("-W", "error", "-W", "ignore:builtin type:DeprecationWarning")


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for module in ("mesonpy", "build", "venv", "ensurepip"):
            if importlib.util.find_spec(module) is None:
                raise unittest.SkipTest(f"there is no {module}")
        if not shutil.which("patchelf"):
            raise unittest.SkipTest("there is no patchelf")
        cls.outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        run_quietly(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", cls.folder, small.SOURCE,
                    env=cls.outside)
        (cls.wheel,) = glob.glob(cls.folder + "/*.whl")

    def venv(self, name, *options):
        """A fresh one with the wheel: its Python, which sees nothing of the build."""
        run_quietly(sys.executable, "-m", "venv", *options, f"{self.folder}/{name}", env=self.outside)
        run_quietly(f"{self.folder}/{name}/bin/pip", "install", "--no-index", "--no-deps", self.wheel, env=self.outside)
        return f"{self.folder}/{name}/bin/python"

    def test_it_holds_the_package_alone(self):
        with zipfile.ZipFile(self.wheel) as file:
            names = [name for name in file.namelist() if ".dist-info/" not in name]
        sources = os.listdir(os.path.join(small.SOURCE, "bindings", "python", "glm52"))
        expected = {name for name in sources if name.endswith(".py")} | {"py.typed", "_glm52.pyi"}
        modules = [name for name in names if name.endswith(".so")]
        self.assertEqual(len(modules), 1, names)
        self.assertEqual({f"glm52/{name}" for name in expected}, set(names) - set(modules))

    def test_in_a_fresh_venv(self):
        python = self.venv("here", "--system-site-packages")
        place = run_quietly(python, *STRICT, "-c", PROGRAM, cwd=self.folder, env=self.outside)
        self.assertIn(self.folder + "/here/", place)
        (module,) = glob.glob(self.folder + "/here/lib/python*/site-packages/glm52/_glm52*.so")
        symbols = run_quietly("nm", "-D", "--defined-only", module)
        self.assertEqual([line.split()[-1] for line in symbols.splitlines()], ["PyInit__glm52"])

    def test_with_numpy_2(self):
        python = self.venv("numpy2")
        got = subprocess.run([python, "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "10",
                              "numpy>=2"],
                             capture_output=True, check=False, env=self.outside)
        if got.returncode:
            self.skipTest("no numpy 2 can be had here")
        version = run_quietly(python, "-c", "import numpy; print(numpy.__version__)", env=self.outside)
        self.assertGreaterEqual(int(version.split(".")[0]), 2)
        here = os.path.dirname(os.path.abspath(__file__))
        run_quietly(python, *STRICT, "-c", PROGRAM, cwd=self.folder, env=self.outside)
        said = run_quietly(python, os.path.join(here, "tap.py"), os.path.join(here, "arrays.py"), env=self.outside)
        self.assertRegex(said, r"(?m)^ok 13 ")
        self.assertNotIn("not ok", said)
