"""python_step.py C_STEP TEXT [PAIRS]: what driving a training step from Python costs. Steps of preset tiny, 2048 tokens, by a C program
and by step.run() of this process in turn, with the same weights and data. Compares medians by the clock and in processor time, which
other programs disturb less; then the cost of getters. Fails if the losses differ, if clock and processor time both miss the target, or
if a getter does."""
import statistics
import subprocess
import sys
import time
import timeit

import glm52

TARGET, GETTER_TARGET = 1.01, 2e-6


def by_c(program):
    program.stdin.write("\n")
    program.stdin.flush()
    return [float(word) for word in program.stdout.readline().split()]


def steps(c_step, text, pairs):
    """(clock, processor, loss) of steps by C and by Python."""
    taken = {"C": [], "Python": []}
    options = {"data.pack_tokens": 2048, "data.document_tokens": 256, "train.microbatch_tokens": 2048, "data.text": text}
    with subprocess.Popen([c_step, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program, \
            glm52.Context("cpu") as context:
        model = glm52.Model(context, options, model={"preset": "tiny"})
        step = glm52.Step(model, glm52.Optimizer(model))
        data = glm52.Dataset(context, model.config)
        began = [0.0, 0.0]

        def on_step(metrics):
            taken["Python"].append((time.monotonic() - began[0], time.process_time() - began[1], metrics.loss))
            taken["C"].append(by_c(program))
            began[:] = time.monotonic(), time.process_time()

        began[:] = time.monotonic(), time.process_time()
        step.run(data, steps=pairs + 2, progress=None, on_step=on_step)
        program.stdin.close()
    return taken["C"][2:], taken["Python"][2:]  # the first ones warm up


def compare(name, index, c, python):
    ours, theirs = [row[index] for row in python], [row[index] for row in c]
    ratio = statistics.median(ours) / statistics.median(theirs)
    paired = 1 + statistics.median(a - b for a, b in zip(ours, theirs)) / statistics.median(theirs)
    print(f"{name:<9}  by C {1e3 * statistics.median(theirs):.3f} ms, by Python {1e3 * statistics.median(ours):.3f} ms: "
          f"ratio {ratio:.4f}, of the pairs' differences {paired:.4f}")
    return min(ratio, paired)


def getters():
    """Seconds per call, loop and all; the best of many."""
    with glm52.Context("cpu", threads=1) as context:
        model = glm52.Model(context, model={"preset": "tiny"}, train={"microbatch_tokens": 64}, data={"pack_tokens": 64})
        step, batch = glm52.Step(model, glm52.Optimizer(model)), glm52.Batch(context, list(range(64)))
        step.run(batch)
        calls = {"step.metric": lambda: step.metric("loss"), "len(batch)": lambda: len(batch), "context.memory": lambda: context.memory,
                 "model.size": lambda: model.size, "config_get": lambda: glm52._glm52.config_get(model.config._handle, "optim.lr")}

        def cost(call):
            return min(timeit.repeat(call, number=500, repeat=200)) / 500

        return {name: cost(call) for name, call in calls.items()}


def main(c_step, text, pairs="60"):
    c, python = steps(c_step, text, int(pairs))
    same = all(a[2] == b[2] for a, b in zip(c, python))
    print(f"preset tiny, 2048 tokens in documents of 256, {pairs} pairs of steps, losses {'alike' if same else 'DIFFER'}")
    clock, processor = compare("clock", 0, c, python), compare("processor", 1, c, python)
    print(f"a step driven by Python, target {TARGET}: {'met' if clock <= TARGET else 'MISSED'} by the clock, "
          f"{'met' if processor <= TARGET else 'MISSED'} in processor time")
    costs = getters()
    print("getters  " + ", ".join(f"{name} {1e6 * seconds:.2f} us" for name, seconds in costs.items())
          + f"; target {1e6 * GETTER_TARGET:.0f} us: {'met' if max(costs.values()) < GETTER_TARGET else 'MISSED'}")
    return not same or (clock > TARGET and processor > TARGET) or max(costs.values()) >= GETTER_TARGET


sys.exit(main(*sys.argv[1:]))
