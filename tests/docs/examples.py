"""examples.py PAGE BUILD: does what a reader of the page would do, in an empty directory with the library installed.
Prints TAP.

A fenced block with a file name after its language is written to that file; a block of sh is run; a block of text
after it is what it printed, where "..." stands for anything, also a line of its own for any lines. Where a page asks
for what was not built here (the module of a language), the block is skipped, and that counts.
"""
import os
import re
import subprocess
import sys
import tempfile

FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
RHYMES = ["In the beginning was the word, and the word was with all who heard.",
          "A time to sow, a time to reap, a time to wake, a time to sleep.",
          "The rain falls down on hill and town, on mill and crown, the rain falls down."]


def pattern(expected):
    parts = re.escape(expected.strip()).replace(re.escape("..."), "\0")
    parts = re.sub(r"(?m)^\0\\\n", r"(?s:(?:.*\\n)??)", parts)  # a line of its own
    parts = re.sub(r"(?m)^\0\Z", "(?s:.*)", parts)
    return parts.replace("\0", ".*?") + r"\s*\Z"


def outside(root):
    """The environment of a user who has installed the library: command, modules and header are found there."""
    prefix = next(path for path, folders, _ in os.walk(root) if "include" in folders)
    found = {name: os.path.join(path, name) for path, _, names in os.walk(root) for name in names}
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PKG_CONFIG_SYSROOT_DIR": root}
    here["PATH"] = os.pathsep.join([os.path.join(root, "python"), os.path.join(prefix, "bin"), os.environ["PATH"]])
    here["PKG_CONFIG_PATH"] = os.path.dirname(found["glm52.pc"])
    here["LD_LIBRARY_PATH"] = os.path.dirname(found["libglm52.so.0"])
    package = os.path.dirname(found.get("_arrays.py", ""))
    here["PYTHONPATH"] = os.path.dirname(package)
    os.makedirs(os.path.join(root, "python"))
    os.symlink(sys.executable, os.path.join(root, "python", "python3"))
    return here, bool(package) and can_import_numpy(), os.path.exists(os.path.join(prefix, "bin", "glm52"))


def can_import_numpy():
    done = subprocess.run([sys.executable, "-c", "import numpy"], stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def main(page, build):
    with open(page, encoding="utf-8") as file:
        blocks = FENCE.findall(file.read())
    steps = [i for i, (language, _, _) in enumerate(blocks) if language == "sh"]
    print(f"1..{len(steps)}", flush=True)
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as work:
        subprocess.run(["meson", "install", "-C", build, "--no-rebuild"], env={**os.environ, "DESTDIR": root},
                       check=True, stdout=subprocess.DEVNULL)
        environment, has_python, has_lua = outside(root)
        with open(os.path.join(work, "novel.txt"), "w", encoding="utf-8") as file:
            file.writelines(f"{i} {RHYMES[i * i % 7 % 3]}\n" for i in range(400))
        for i, (language, name, text) in enumerate(blocks):
            if name:
                with open(os.path.join(work, name), "w", encoding="utf-8") as file:
                    file.write(text)
            if language != "sh":
                continue
            number, title = steps.index(i) + 1, text.splitlines()[0]
            if "python3" in text and not has_python or re.search(r"^glm52 ", text, re.M) and not has_lua:
                print(f"ok {number} - {title} # SKIP not built here", flush=True)
                continue
            done = subprocess.run(["sh", "-ec", text], cwd=work, env=environment, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, check=False)
            follows = blocks[i + 1] if i + 1 < len(blocks) else ("", "", "")
            good = done.returncode == 0 and (follows[0] != "text" or re.match(pattern(follows[2]), done.stdout))
            if not good:
                print("# " + f"{done.stdout}(status {done.returncode})".replace("\n", "\n# "))
            print(f"{'ok' if good else 'not ok'} {number} - {title}", flush=True)


main(sys.argv[1], sys.argv[2])
