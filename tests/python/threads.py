"""The GIL, other threads, cancelling, Ctrl-C."""
import _thread
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import glm52
import small


def long_step(context):
    """A step that takes a good part of a second or more; with a sanitizer, several."""
    model = glm52.Model(context, {"model.preset": "tiny", "train.microbatch_tokens": 512, "data.pack_tokens": 512,
                                  "train.microbatches": 64})
    step = glm52.Step(model, glm52.Optimizer(model))
    import numpy as np

    return step, [glm52.Batch(context, np.arange(512) % 256) for _ in range(1 if small.sanitized() else 8)]


class Threads(unittest.TestCase):
    def setUp(self):
        self.context = glm52.Context(threads=1)
        self.addCleanup(self.context.close)

    def test_another_thread_runs_meanwhile(self):
        step, batches = long_step(self.context)
        wakes, stop = [0], threading.Event()

        def count():
            while not stop.wait(0.002):
                wakes[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        step.run(batches)
        stop.set()
        thread.join()
        self.assertGreater(wakes[0], 20)

    def test_threads_share_a_context(self):
        step = small.trainer(self.context)[1]
        failures = []

        def work(seed):
            try:
                for _ in range(40):
                    batch = small.batch(self.context, seed=seed)
                    step.run(batch)
                    step.metric("loss"), step.model.forward(batch, "topk.*"), repr(step.model)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(step.metric("step"), 160)

    def test_closing_while_another_thread_works(self):
        step, batches = long_step(self.context)
        outcome = []

        def work():
            try:
                while True:
                    step.run(batches[:1])
            except glm52.HandleError as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.3)
        self.context.close()
        thread.join(60)
        self.assertEqual(len(outcome), 1)


class Cancelling(unittest.TestCase):
    def setUp(self):
        self.dropped = 0
        self.context = glm52.Context(threads=1)
        self.addCleanup(self.context.close)

    def test_cancel_from_another_thread(self):
        step, batches = long_step(self.context)
        before = step.model[0].numpy().copy()
        timer = threading.Timer(0.2, self.context.cancel)
        timer.start()
        with self.assertRaises(KeyboardInterrupt) as caught:
            step.run(batches * 8)
        self.assertIsInstance(caught.exception, glm52.Cancelled)
        self.assertTrue((step.model[0].numpy() == before).all())
        self.assertEqual(step.run(batches[0]).step, 1)

    def test_interrupt_ends_one_long_update(self):
        step, batches = long_step(self.context)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        begin = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            step.run(batches * 8)
        first = time.monotonic() - begin
        begin = time.monotonic()
        self.assertEqual(step.run(batches[0]).step, 1)
        one = time.monotonic() - begin
        self.assertLess(first, 0.2 + 10 * one + 1)

    def test_interrupt_ends_a_run_with_its_history(self):
        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)

        def on_step(metrics):
            if metrics.step == 7:
                os.kill(os.getpid(), signal.SIGINT)

        with self.assertRaises(KeyboardInterrupt) as caught:
            step.run((batch for _ in range(10**6)), steps=10**6, progress=None, on_step=on_step)
        self.assertIsInstance(caught.exception, glm52.Cancelled)
        self.assertIn(len(caught.exception.history), (7, 8))
        self.assertIn("steps", str(caught.exception))
        more = step.run((batch for _ in range(3)), progress=None)
        self.assertEqual(more[0].step, len(caught.exception.history) + 1)

    def interrupted(self, step, batch, delay, interrupt):
        """A run that is interrupted after `delay` seconds. Python drops what a signal handler raises in a weak
        reference's callback, and a collection may call one at any moment: then another interrupt comes, and is
        counted."""
        ended = threading.Event()

        def work():
            time.sleep(delay)
            interrupt()
            for _ in range(10):
                if ended.wait(5):
                    return
                self.dropped += 1
                interrupt()

        thread = threading.Thread(target=work)
        try:
            thread.start()
            step.run((batch for _ in range(10**6)), progress=None)
        except KeyboardInterrupt:
            pass
        finally:
            ended.set()
        thread.join()  # would raise what the run had not noticed

    def test_interrupts_at_any_moment(self):
        """Each ends the run that it came for and no other, and no update is missing from the history."""
        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)
        for i in range(1000):
            self.interrupted(step, batch, 0.000005 * (i % 200), _thread.interrupt_main)
        self.assertLess(self.dropped, 5)
        self.assertEqual(step.history["step"], list(range(1, len(step.history) + 1)))
        self.assertEqual(step.run(batch).step, len(step.history))

    def test_a_second_interrupt_leaves_nothing_running(self):
        step = small.trainer(self.context)[1]
        batch = small.batch(self.context)

        def twice():
            _thread.interrupt_main()
            _thread.interrupt_main()

        for i in range(200):
            try:
                self.interrupted(step, batch, 0.00001 * i, twice)
            except KeyboardInterrupt:  # the second, after the run
                pass
            done = step.metric("step")
            time.sleep(0.0005)
            self.assertEqual(step.metric("step"), done)
        self.assertEqual(step.run(batch).step, done + 1)

    def test_interrupt_ends_the_waiting_for_another_thread(self):
        step, batches = long_step(self.context)
        batch, outcome, begun = batches[0], [], threading.Event()

        def work():
            begun.set()
            outcome.append(step.run(batches).step)

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        time.sleep(0.2)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with self.assertRaises(KeyboardInterrupt):
            step.evaluate(batch)
        self.assertEqual(outcome, [])
        thread.join()
        self.assertEqual(outcome, [1])  # the other thread's work was not for the signal to end

    def test_handlers_that_do_not_raise_do_not_cancel(self):
        step, batches = long_step(self.context)
        seen = []
        before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
        try:
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            begin = time.monotonic()
            self.assertEqual(step.run(batches).step, 1)
            end = time.monotonic()
        finally:
            signal.signal(signal.SIGUSR1, before)
        self.assertTrue(begin < seen[0] <= end)

    def test_interpreter_ends_while_a_thread_trains(self):
        program = ("import threading, glm52, small, sys\n"
                   "context = glm52.Context(threads=1)\n"
                   "step = small.trainer(context)[1]; batch = small.batch(context)\n"
                   "def work():\n    while True: step.run(batch)\n"
                   "threading.Thread(target=work, daemon=True).start()\n"
                   "step.run((batch for _ in range(20)), progress=None)\n"
                   "print('done')\n")
        here = os.path.dirname(os.path.abspath(small.__file__))
        # The interpreter ends the thread within a call, whose memory nobody can release: no leak to report.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
                       "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                              timeout=100, check=False)
        self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)
