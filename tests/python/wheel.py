"""The wheel, built by meson-python and installed in a fresh venv."""
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

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


class Wheel(unittest.TestCase):
    def run_quietly(self, *command, **options):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
        self.assertEqual(done.returncode, 0, done.stdout[-4000:])
        return done.stdout

    def test_wheel_in_a_fresh_venv(self):
        for module in ("mesonpy", "build", "venv", "ensurepip"):
            if importlib.util.find_spec(module) is None:
                self.skipTest(f"there is no {module}")
        if not shutil.which("patchelf"):
            self.skipTest("there is no patchelf")
        outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with tempfile.TemporaryDirectory() as folder:
            self.run_quietly(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, small.SOURCE,
                             env=outside)
            (wheel,) = glob.glob(folder + "/*.whl")
            names = self.run_quietly(sys.executable, "-m", "zipfile", "-l", wheel)
            self.assertNotIn("libglm52.so", names)
            self.assertIn("py.typed", names)
            self.run_quietly(sys.executable, "-m", "venv", "--system-site-packages", folder + "/venv", env=outside)
            self.run_quietly(folder + "/venv/bin/pip", "install", "--no-index", "--no-deps", wheel, env=outside)
            place = self.run_quietly(folder + "/venv/bin/python", "-W", "error", "-c", PROGRAM, cwd=folder, env=outside)
            self.assertIn(folder + "/venv/", place)
            (module,) = glob.glob(folder + "/venv/lib/python*/site-packages/glm52/_glm52*.so")
            symbols = self.run_quietly("nm", "-D", "--defined-only", module)
            self.assertEqual([line.split()[-1] for line in symbols.splitlines()], ["PyInit__glm52"])
