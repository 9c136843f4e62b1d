"""python_step.py C_STEP TEXT [ROUNDS]: what driving a training step from Python costs. Steps of preset tiny, 2048
tokens, by two equal C programs and by a Python program in turn, with the same weights and data; new programs every
ten steps, for where their memory lies alone makes 1 % of difference, as the two C programs show. Compares medians by
the clock and in processor time, which others on the machine disturb less, and says how long Python was busy around
the library's own time; then the cost of getters. Fails if the losses differ, if clock
and processor time both miss the target, or if a getter does.

python_step.py TEXT: the Python program: a step for each line that comes in."""
import statistics
import subprocess
import sys
import time
import timeit

import glm52

TARGET, GETTER_TARGET = 1.01, 2e-6
STEPS, WARM = 10, 2  # of a round


def serve(text):
    options = {"data.pack_tokens": 2048, "data.document_tokens": 256, "train.microbatch_tokens": 2048,
               "data.text": text}
    with glm52.Context("cpu") as context:
        model = glm52.Model(context, options, model={"preset": "tiny"})
        step = glm52.Step(model, glm52.Optimizer(model))
        data = glm52.Dataset(context, model.config)
        began = [0.0, 0.0]

        def on_step(metrics):
            clock, processor = time.monotonic() - began[0], time.process_time() - began[1]
            print(clock, processor, metrics.loss, clock - metrics.seconds, flush=True)
            more = sys.stdin.readline()
            began[:] = time.monotonic(), time.process_time()
            return bool(more)

        if sys.stdin.readline():
            began[:] = time.monotonic(), time.process_time()
            step.run(data, steps=10**6, progress=None, on_step=on_step)


def steps(c_step, text, rounds):
    """Rows of (clock, processor, loss) by name of the program; those of Python have the seconds around the library's
    own time too."""
    commands = {"C": [c_step, text], "C again": [c_step, text], "Python": [sys.executable, sys.argv[0], text]}
    taken = {name: [] for name in commands}
    for _ in range(rounds):
        programs = {name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    for name, command in commands.items()}
        for i in range(STEPS + WARM):
            for name in sorted(programs, reverse=bool(i % 2)):
                programs[name].stdin.write("\n")
                programs[name].stdin.flush()
                row = [float(word) for word in programs[name].stdout.readline().split()]
                if i >= WARM:
                    taken[name].append(row)
        for program in programs.values():
            program.communicate()
    return taken


def compare(name, index, taken):
    middle = {who: statistics.median(row[index] for row in rows) for who, rows in taken.items()}
    ratio = middle["Python"] / statistics.median(row[index] for who in ("C", "C again") for row in taken[who])
    print(f"{name:<9}  " + ", ".join(f"by {who} {1e3 * seconds:.2f} ms" for who, seconds in middle.items())
          + f": Python {ratio:.4f} of both, C again {middle['C again'] / middle['C']:.4f} of C")
    return ratio


def getters():
    """Seconds per call, loop and all; the best of many."""
    with glm52.Context("cpu", threads=1) as context:
        model = glm52.Model(context, model={"preset": "tiny"}, train={"microbatch_tokens": 64},
                            data={"pack_tokens": 64})
        step, batch = glm52.Step(model, glm52.Optimizer(model)), glm52.Batch(context, list(range(64)))
        step.run(batch)
        calls = {"step.metric": lambda: step.metric("loss"), "len(batch)": lambda: len(batch),
                 "context.memory": lambda: context.memory, "model.size": lambda: model.size,
                 "config_get": lambda: glm52._glm52.config_get(model.config._handle, "optim.lr")}

        def cost(call):
            return min(timeit.repeat(call, number=500, repeat=200)) / 500

        return {name: cost(call) for name, call in calls.items()}


def main(c_step, text, rounds="6"):
    taken = steps(c_step, text, int(rounds))
    same = all(len({row[2] for row in rows}) == 1 for rows in zip(*taken.values()))
    print(f"preset tiny, 2048 tokens in documents of 256, {rounds} times {STEPS} steps each, "
          f"losses {'alike' if same else 'DIFFER'}")
    clock, processor = compare("clock", 0, taken), compare("processor", 1, taken)
    around, own = ([row[index] for row in taken["Python"]] for index in (3, 0))
    print(f"around the library's own time {1e3 * statistics.median(around):.2f} ms, "
          f"{100 * statistics.median(around) / statistics.median(own):.2f} % (least {1e3 * min(around):.2f} ms)")
    print(f"a step driven by Python, target {TARGET}: {'met' if clock <= TARGET else 'MISSED'} by the clock, "
          f"{'met' if processor <= TARGET else 'MISSED'} in processor time")
    costs = getters()
    print("getters  " + ", ".join(f"{name} {1e6 * seconds:.2f} us" for name, seconds in costs.items())
          + f"; target {1e6 * GETTER_TARGET:.0f} us: {'met' if max(costs.values()) < GETTER_TARGET else 'MISSED'}")
    return not same or (clock > TARGET and processor > TARGET) or max(costs.values()) >= GETTER_TARGET


if len(sys.argv) == 2:
    serve(sys.argv[1])
else:
    sys.exit(main(*sys.argv[1:]))
